"""The application behind `tailrace view`: the page's files, its answers and its events."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import TYPE_CHECKING, Any

from tailrace.errors import MissingDependency, TailraceError
from tailrace.page.followed import FollowedRun
from tailrace.page.server.answers import Answers
from tailrace.page.server.events import Follower
from tailrace.page.server.guard import Guard

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

QUESTIONS = [
    "overview",
    "curves",
    "findings",
    "about",
    "catalogue",
    "tensor",
    "layers",
    "plan",
    "cell",
]
"""The requests of the page: methods of `Answers`."""

KINDS = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
"""The file types served from the folder `static`, by suffix."""


def make_app(runs: Sequence[FollowedRun], token: str, follower: Follower | None = None) -> Guard:
    """An ASGI application that shows runs to holders of the token."""
    try:
        from starlette.applications import Starlette
        from starlette.concurrency import run_in_threadpool
        from starlette.responses import Response, StreamingResponse
        from starlette.routing import Route
    except ImportError as error:
        raise MissingDependency.for_feature("The page", "starlette", "view") from error

    answers = Answers(runs)
    follower = Follower(runs) if follower is None else follower
    static = files("tailrace.page.static")

    async def page(request: Request) -> Response:
        # Everything that the page loads has the token in its path; see `Guard`.
        text = static.joinpath("index.html").read_text(encoding="utf-8")
        return Response(text.replace("BASE", f"/{token}/"), media_type="text/html")

    async def file(request: Request) -> Response:
        found = static_file(static, request.path_params["path"])
        if found is None:
            return Response("There is no such file.\n", 404, media_type="text/plain")
        return Response(found[0], media_type=found[1])

    async def events(request: Request) -> Response:
        if request.method == "HEAD":  # a stream has no end, and this needs one
            return Response(media_type="text/event-stream")
        return StreamingResponse(follower.events(), media_type="text/event-stream")

    def answering(answer: Callable[[dict[str, str]], Any]) -> Callable[[Request], Any]:
        async def endpoint(request: Request) -> Response:
            try:
                # In a thread: reading a run takes a while, and events of other pages must not wait.
                found = await run_in_threadpool(answer, dict(request.query_params))
            except TailraceError as error:
                return Response(
                    as_json({"problem": str(error)}), 400, media_type="application/json"
                )
            return Response(as_json(found), media_type="application/json")

        return endpoint

    routes = [Route(f"/api/{name}", answering(getattr(answers, name))) for name in QUESTIONS]
    routes += [Route("/", page), Route("/events", events), Route("/static/{path:path}", file)]
    return Guard(Starlette(routes=routes), token)


def static_file(static: Traversable, path: str) -> tuple[bytes, str] | None:
    """A file of the page, with its type; None for any other path."""
    parts = path.split("/")
    ending = "." + path.rpartition(".")[2]
    # Never outside of the folder: no "..", and no backslash, which separates parts on Windows.
    if ending not in KINDS or any(part in ("", ".", "..") or "\\" in part for part in parts):
        return None
    try:
        found = static.joinpath(*parts)
        return (found.read_bytes(), KINDS[ending]) if found.is_file() else None
    except (OSError, ValueError):  # a name that is too long, or that no file can have
        return None


def as_json(value: object) -> str:
    """Text that browsers can parse: without NaN, which JSON does not have."""
    return json.dumps(value, allow_nan=False, separators=(",", ":"), default=str)
