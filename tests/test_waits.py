"""No wait is without a limit or a heartbeat: who waits looks up every so often."""

import ast
import re
from pathlib import Path

import pytest

import tailrace as tr

HERE = Path(tr.__file__).parent
FILES = sorted(HERE.rglob("*.py"))
WAITS = ("get", "join", "wait", "acquire", "result", "exception", "communicate", "accept", "recv")

ALLOWED = {
    "compat/ipu/strategy/in_keras.py": {"computed.get()"},  # a context variable
    "compat/tensorflow/keras/__init__.py": {"_older.accept()"},  # older spellings, not a socket
    "devices/processes/rollcall.py": {
        "self._server.accept()"
    },  # the selector says that one is there
    "feeds/background.py": {"calls.get()"},  # a thread without work; no other thread waits for it
    "feeds/staging.py": {"future.result()", "future.exception()"},  # after `Patience.wait_for`
    "keras/checkpoints/keeping.py": {"future.result()"},  # likewise
    "keras/data/batch_source.py": {"waiting.result()", "future.result()"},
    "keras/data/first_batch.py": {"future.result()"},
    "runs/writer.py": {"self._lock.acquire()"},  # a lock of files: refused at once
    "torch/calls/loader.py": {"future.result()"},  # after `Patience.wait_for`
    "trainer/checkpoints/directory.py": {"self._lock.acquire()"},  # likewise
    "trainer/checkpoints/writer.py": {"busy.result()", "self.wait()"},  # after `Patience.wait_for`
    "trainer/evaluation/combining.py": {"one.result()"},  # a metric
}


def waits_in(text):
    """Calls of a waiting method without any argument, so without a limit; contexts do not wait."""
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call) or node.args or node.keywords:
            continue
        if isinstance(node.func, ast.Attribute) and node.func.attr in WAITS:
            name = ast.unparse(node.func.value).rpartition(".")[2]
            if not re.search(rf"\b{name}\b.*ContextVar", text):
                yield ast.unparse(node)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(HERE)))
def test_no_wait_is_without_a_limit(path):
    found = set(waits_in(path.read_text(encoding="utf-8")))
    allowed = ALLOWED.get(path.relative_to(HERE).as_posix(), set())
    assert found <= allowed, "give it a timeout in a loop; see feeds/waiting.py"
    assert allowed <= found, "it is not there any more"


def test_waits_are_noticed():
    assert list(waits_in("queue.get()")) == ["queue.get()"]
    assert list(waits_in("self._thread.join(); x.wait(timeout=1); y.acquire(False)")) == [
        "self._thread.join()"
    ]
    assert not list(waits_in("_open = ContextVar('x')\n_open.get()"))
