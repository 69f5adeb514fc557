// Questions to the server. Its address is that of this file, which has the token in its path.

const base = new URL("..", import.meta.url);

export async function ask(name, query = {}) {
  const address = new URL(`api/${name}`, base);
  for (const [key, value] of Object.entries(query)) {
    if (value != null && value !== "") address.searchParams.set(key, value);
  }
  const answer = await fetch(address);
  const found = await answer.json();
  if (!answer.ok) throw new Error(found.problem);
  return found;
}

export function listen(changed, connected) {
  const source = new EventSource(new URL("events", base));
  source.addEventListener("versions", (event) => changed(JSON.parse(event.data)));
  source.onopen = () => connected(true);
  source.onerror = () => connected(false);
}

export function unpack(text) {
  const characters = atob(text);
  const bytes = new Uint8Array(characters.length);
  for (let i = 0; i < bytes.length; i++) bytes[i] = characters.charCodeAt(i);
  return new Float32Array(bytes.buffer);
}
