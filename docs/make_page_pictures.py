"""Make the pictures of the live page: `python docs/make_page_pictures.py`.

Trains two deep networks for a minute, one of which loses its gradients, serves the page about both
and photographs it in Chromium. Needs `pip install 'tailrace[view]' playwright` and a Chromium.
"""

import itertools
import shutil
import sys
import tempfile
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import tailrace as tr

IMAGES = Path(__file__).parent / "images"
LAYERS, WIDTH = 12, 64
SHOTS = {
    "page_overview": ("overview", 1280, 830, "light"),
    "page_layers": ("layers", 1280, 720, "dark"),
    "page_tensor": ("tensors/grad%2Flayer00%2Fw", 1280, 940, "light"),
}
"""The pictures: what is open, the size of the window, and the colours."""


def network(params: dict, x: jax.Array, activation: str) -> jax.Array:
    """A deep network of plain layers."""
    h = x.reshape(len(x), -1) / 255
    for number in range(LAYERS):
        layer = params[f"layer{number:02}"]
        with jax.named_scope(f"layer{number:02}"):
            h = h @ layer["w"] + layer["b"]
            if number < LAYERS - 1:
                h = getattr(jax.nn, activation)(h)
    return h


def train(directory: Path, activation: str, gain: float) -> None:
    """Train it on digits, with what the page shows recorded in every step."""
    rng = np.random.default_rng(0)
    sizes = [784, *[WIDTH] * (LAYERS - 1), 10]
    params = {
        f"layer{n:02}": {
            "w": (rng.normal(size=(a, b)) * gain / np.sqrt(a)).astype(np.float32),
            "b": np.zeros(b, np.float32),
        }
        for n, (a, b) in enumerate(itertools.pairwise(sizes))
    }

    def loss_fn(params: dict, x: jax.Array, y: jax.Array) -> tuple:
        logits = network(params, x, activation)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()
        return loss, {"accuracy": (jnp.argmax(logits, axis=1) == y).mean()}

    trainer = tr.Trainer(
        loss_fn,
        optax.sgd(0.1),
        params,
        observe=[
            tr.Tap(["grad/*", "activation/layer??", "param/*/w", "update/*/w"]),
            tr.Tap("grad/*/w", reduce="histogram"),
        ],
        run_dir=directory,
        steps_per_execution=10,
    )
    digits = tr.batches(tr.data.digits("train"), 100, shuffle=True, seed=0, repeat=True)
    trainer.fit(digits, steps=400, progress=False)


def photograph(directory: Path) -> None:
    """Serve the page about the runs of a folder and take its pictures."""
    from playwright.sync_api import sync_playwright

    from tailrace.page.server.serve import serve

    addresses: list[str] = []
    ready, stop = threading.Event(), threading.Event()

    def announce(text: str) -> None:
        addresses.append(text.split()[2])
        ready.set()

    server = threading.Thread(
        target=serve, args=([directory],), kwargs={"announce": announce, "stop": stop}, daemon=True
    )
    server.start()
    ready.wait()
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for name, (view, width, height, scheme) in SHOTS.items():
            page = browser.new_page(
                viewport={"width": width, "height": height}, color_scheme=scheme
            )
            page.goto(f"{addresses[0]}#{view}")
            page.wait_for_selector('main[aria-busy="false"]')
            page.wait_for_timeout(2000)
            page.screenshot(path=IMAGES / f"{name}.png")
            print(IMAGES / f"{name}.png")
        browser.close()
    stop.set()
    server.join()


def main() -> int:
    """Train, serve, photograph."""
    with tempfile.TemporaryDirectory() as folder:
        train(Path(folder) / "relu", "relu", np.sqrt(2))
        train(Path(folder) / "sigmoid", "sigmoid", 1.0)
        photograph(Path(folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
