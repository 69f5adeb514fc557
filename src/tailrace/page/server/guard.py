"""Access control of the page: requests need the token, and a host name of this machine.

A page on the loopback interface can be reached by every program and every web site that the user has
open. So each request needs the token of the printed address, and a host name that only this machine
has: a foreign site whose name resolves to this machine (DNS rebinding) is refused before anything is
read.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

Message = Mapping[str, Any]
Scope = Mapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Any, Any, Any], Awaitable[None]]
"""The types of ASGI."""

HOSTS = ("127.0.0.1", "localhost", "[::1]")
"""The accepted host names, with any port, since a tunnel has another one."""

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""The content security policy of the page: only its own files."""

HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Guard:
    """Passes requests with the token to an application, and refuses all others.

    The first page has the token in its address as `?token=`; everything it loads has it as the first
    part of the path. A cookie would be visible to other ports of this machine.

    Args:
        app: the ASGI application; it sees paths without the token.
        token: the token.
    """

    def __init__(self, app: App, token: str) -> None:
        self._app, self._token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or pass it on."""
        if scope["type"] != "http":
            # The page uses no web sockets: they get no answer.
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        refused = self._refusal(scope)
        if refused:
            await self._refuse(send, *refused)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [(k.lower().encode(), v.encode()) for k, v in HEADERS.items()]
                message = {**message, "headers": [*message["headers"], *headers]}
            await send(message)

        await self._app(self._inner(scope), receive, with_headers)

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        if _host(scope) not in HOSTS:
            return 403, "This page has an address of this machine only: http://127.0.0.1."
        if scope["method"] not in ("GET", "HEAD"):
            return 405, "This page is read-only: it answers GET and HEAD."
        given = self._given(scope)
        if not given:
            return 401, "This page needs the token of the address that `tailrace view` printed."
        # In constant time: how long a comparison takes must not reveal how much of a token was right.
        if not hmac.compare_digest(given.encode(), self._token.encode()):
            return 403, "This is not the token of the address that `tailrace view` printed."
        return None

    def _given(self, scope: Scope) -> str:
        """The token of a request: in the query of the first page, in the path of all others."""
        if scope["path"] in ("/", ""):
            from urllib.parse import parse_qs

            return parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
        first, slash, _ = scope["path"].lstrip("/").partition("/")
        return first if slash else ""

    def _inner(self, scope: Scope) -> Scope:
        if scope["path"] in ("/", ""):
            return {**scope, "path": "/"}
        path = "/" + scope["path"].lstrip("/").partition("/")[2]
        return {**scope, "path": path, "raw_path": path.encode(), "root_path": ""}

    @staticmethod
    async def _refuse(send: Send, status: int, text: str) -> None:
        headers = {**HEADERS, "Content-Type": "text/plain; charset=utf-8"}
        pairs = [(k.lower().encode(), v.encode()) for k, v in headers.items()]
        await send({"type": "http.response.start", "status": status, "headers": pairs})
        await send({"type": "http.response.body", "body": f"{text}\n".encode()})


def _host(scope: Scope) -> str:
    """The name that a request was sent to, without its port."""
    named = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
    # Servers disagree about which of two Host headers counts, so two are as bad as none.
    if len(named) != 1:
        return ""
    host, colon, port = named[0].rpartition(":")
    return host if colon and port.isdigit() else named[0]
