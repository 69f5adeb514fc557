"""`tailrace view`: find the runs, open a port of this machine, print the address, serve."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import secrets
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

from tailrace.errors import MissingDependency, OptionError
from tailrace.page.server.app import make_app
from tailrace.page.server.events import Follower
from tailrace.page.server.shown_runs import ShownRuns

LOOPBACK = "127.0.0.1"


def serve(
    directories: Sequence[str | os.PathLike[str]],
    port: int = 0,
    *,
    announce: Callable[[str], None] | None = None,
    stop: threading.Event | None = None,
) -> None:
    """Serve the page about some runs until Ctrl-C.

    Args:
        directories: run directories, or folders of them.
        port: where to listen; 0 for a free port.
        announce: called with the address, including the token; None prints it.
        stop: ends the server when it is set.
    """
    try:
        import uvicorn
    except ImportError as error:
        raise MissingDependency.for_feature("The page", "uvicorn", "view") from error
    runs, token = ShownRuns(directories), secrets.token_urlsafe(24)
    follower = Follower(runs)
    app = make_app(runs, token, follower)
    listening = _listen(port)
    address = f"http://{LOOPBACK}:{listening.getsockname()[1]}/?token={token}"
    # Quiet, since the terminal shows the address; a second is enough for open streams to end.
    config = uvicorn.Config(
        app,
        log_config=None,  # its own would close every handler of the process, with their files
        log_level="error",
        access_log=False,
        lifespan="off",
        ws="none",
        timeout_graceful_shutdown=1,
    )
    server = uvicorn.Server(config)
    tell = functools.partial(print, flush=True) if announce is None else announce
    with listening, _ended_by_an_interrupt(server):
        tell(f"Look at {address}  (Ctrl-C ends it)")
        asyncio.run(_serve(server, follower, listening, stop))


@contextlib.contextmanager
def _ended_by_an_interrupt(server: Any) -> Iterator[None]:
    """Let Ctrl-C end the server at any moment, also before it handles signals itself."""
    if threading.current_thread() is not threading.main_thread():  # only it may set handlers
        yield
        return

    def leave(number: int, frame: FrameType | None) -> None:
        # Not an exception: inside the making of an event loop it would leave half of one behind.
        server.should_exit = True

    before = signal.signal(signal.SIGINT, leave)
    try:
        yield
    finally:
        # None: a handler that was not installed from Python, which cannot be put back.
        signal.signal(signal.SIGINT, signal.SIG_DFL if before is None else before)


async def _serve(
    server: Any, follower: Follower, listening: socket.socket, stop: threading.Event | None
) -> None:
    async def watch() -> None:
        while not server.should_exit:
            if stop is not None and stop.is_set():
                server.should_exit = True
            await asyncio.sleep(0.05)
        follower.closing = True  # streams of events end, so that the server can

    watching = asyncio.create_task(watch())
    await server.serve(sockets=[listening])
    server.should_exit = True  # if it could not start, the loop above has to end too
    await watching


def _listen(port: int) -> socket.socket:
    if not 0 <= port < 65536:
        raise OptionError(f"--port is a number from 0 to 65535. Received: {port}.")
    try:
        return socket.create_server((LOOPBACK, port))
    except OSError as error:
        raise OptionError(
            f"Nothing can listen at port {port}: {error.strerror}. Give another --port, or none."
        ) from error
