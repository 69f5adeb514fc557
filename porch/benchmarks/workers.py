"""Processes of a benchmark that wait for orders: a line in, a line of JSON out, within a time limit."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class Worker:
    """A process that answers each line on its standard input with one of JSON.

    Args:
        command: the arguments of Python.
        limit_s: how long to wait for an answer.
        environment: what it has besides ours.
    """

    def __init__(
        self, command: Sequence[str], limit_s: float, environment: dict[str, str] | None = None
    ) -> None:
        root = Path(__file__).resolve().parents[1]
        path = os.pathsep.join([str(root), str(root / "src"), os.environ.get("PYTHONPATH", "")])
        self.limit_s = limit_s
        self._process = subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, **(environment or {}), "PYTHONPATH": path},
        )
        self._answers: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def tell(self, line: str) -> None:
        """Give an order."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        """The answer to the oldest order that has none yet."""
        try:
            line = self._answers.get(timeout=self.limit_s)
        except queue.Empty:
            raise TimeoutError(f"no answer in {self.limit_s} s") from None
        found = json.loads(line) if line else {"failed": "the process ended"}
        if "failed" in found:
            raise RuntimeError(found["failed"])
        return found

    def dismiss(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put("")  # it ended


def serve(work: Any) -> None:
    """Be such a process: `work(order)` returns the answer."""
    for line in sys.stdin:
        try:
            answer = work(line.strip())
        except Exception as error:
            print(json.dumps({"failed": f"{type(error).__name__}: {error}"}), flush=True)
            raise
        print(json.dumps(answer), flush=True)
