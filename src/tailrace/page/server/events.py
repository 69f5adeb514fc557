"""Server-sent events: which runs have grown. The page then requests what it shows."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence

from tailrace.page.followed import FollowedRun
from tailrace.page.server.shown_runs import ShownRuns

LOOK_EVERY_S = 0.5
ALIVE_EVERY_S = 15.0
"""How often a keep-alive line is sent, so that a lost connection is noticed."""


class Follower:
    """Watches runs while there are listeners.

    Args:
        runs: the runs.
        look_every_s: the seconds between two looks.
    """

    def __init__(self, runs: Sequence[FollowedRun], look_every_s: float = LOOK_EVERY_S) -> None:
        self._runs, self._look_every_s = runs, look_every_s
        self.closing = False

    async def events(self) -> AsyncIterator[str]:
        """Events with the versions of all runs: one immediately, then one after each change."""
        loop = asyncio.get_running_loop()
        sent: list[int] = []
        said = loop.time()
        while not self.closing:
            await asyncio.to_thread(self._look)  # reads files, which may take a while
            versions = [followed.version for followed in self._runs]
            if versions != sent:
                sent, said = versions, loop.time()
                yield f"event: versions\ndata: {json.dumps(versions)}\n\n"
            elif loop.time() - said > ALIVE_EVERY_S:
                said = loop.time()
                yield ": alive\n\n"
            await asyncio.sleep(self._look_every_s)

    def _look(self) -> None:
        if isinstance(self._runs, ShownRuns):
            self._runs.find()
        for followed in self._runs:
            followed.look()
