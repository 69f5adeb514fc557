"""One configuration for the whole process, and what every test must leave behind it: nothing.

JAX starts once. So the devices are chosen here, before any test module is imported; workers of
pytest-xdist are processes of their own and import this file too.
"""

import jax
import pytest

import tailrace as tr
from tailrace.messages import forget_notes
from threads import infeed_threads

DEVICES = 8

tr.configure(devices=DEVICES, platform="cpu")
# Mixing dtypes by accident is an error in our own code; a test that mixes on purpose says so.
jax.config.update("jax_numpy_dtype_promotion", "strict")


@pytest.fixture(autouse=True)
def _notes_are_said_anew():
    forget_notes()


@pytest.fixture(autouse=True)
def _no_thread_outlives_its_test(monkeypatch):
    """Close what a test opened, then see that each thread of an infeed has ended.

    `close` is called on every queue, as `with` would; a queue whose thread survives that leaks.
    """
    before = infeed_threads()
    opened: list[tr.InfeedQueue] = []
    plain = tr.InfeedQueue.__init__

    def remember(self, *args, **kwargs):
        plain(self, *args, **kwargs)
        opened.append(self)

    monkeypatch.setattr(tr.InfeedQueue, "__init__", remember)
    yield
    for queue in opened:
        queue.close()
    left = infeed_threads() - before
    assert not left, f"threads outlive their closed queues: {left}"
