"""One configuration for the whole process, and what every test must leave behind it: nothing.

JAX starts once. So the devices are chosen here, before any test module is imported; workers of
pytest-xdist are processes of their own and import this file too.
"""

import random
import sys
import threading

import machine

machine.prepare()

import jax  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

import tailrace as tr  # noqa: E402
from absent import AbsentModule, missing  # noqa: E402
from quick import mark_tiers, repeat  # noqa: E402
from tailrace.base.messages import forget_notes  # noqa: E402
from tailrace.devices import devices  # noqa: E402
from tailrace.program.compiling.compiled_programs import forget_programs  # noqa: E402
from threads import infeed_threads  # noqa: E402
from verdicts import note_failures  # noqa: E402
from waits import wait_until  # noqa: E402

tr.configure(devices=machine.DEVICES if machine.PLATFORM == "cpu" else None)
# Mixing dtypes by accident is an error in our own code; a test that mixes on purpose says so.
jax.config.update("jax_numpy_dtype_promotion", "strict")

# The same examples in every run, and no clock. To search for new ones: --hypothesis-profile=search.
_untimed = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow], "database": None}
settings.register_profile("suite", derandomize=True, **_untimed)
settings.register_profile("search", print_blob=True, **_untimed)
settings.load_profile("suite")


pytest_configure = note_failures
pytest_generate_tests = repeat


def pytest_pycollect_makemodule(module_path, parent):
    return AbsentModule.from_parent(parent, path=module_path) if missing(module_path) else None


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items):
    mark_tiers(items)
    if machine.PLATFORM != "cpu":
        only = pytest.mark.skip(reason="what it tests is a CPU's: virtual devices, its compiler")
        for item in items:
            if item.get_closest_marker("cpu"):
                item.add_marker(only)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item):  # of fixtures
    _draw_the_same_numbers()
    try:
        return (yield)
    except Exception as error:
        machine.skip_without_devices(error)
        raise


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    try:
        return (yield)
    except Exception as error:
        machine.skip_without_devices(error)
        raise


def _draw_the_same_numbers():
    """Whatever tests ran before this one: Keras takes the seeds of its layers from Python's generator.

    Before fixtures. A library that is not loaded yet is not loaded for it.
    """
    random.seed(0)
    np.random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
    if kept := sys.modules.get("keras.src.backend.common.global_state"):
        kept.set_global_attribute("global_seed_generator", None)


@pytest.fixture
def same_devices():
    """Whatever a test chooses, the next one gets the devices of the configuration."""
    chosen = devices.chosen()
    yield
    devices.use(chosen)


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
    wait_until(lambda: infeed_threads() <= before, "threads outlive their closed queues")


@pytest.fixture
def compilations(monkeypatch):
    """The programs compiled so far."""
    forget_programs()
    found = []
    compile_ = jax.stages.Lowered.compile

    def counting(self, *args, **kwargs):
        # On an accelerator a thread compiles, beside this, loops of fixed length for short steps.
        if threading.current_thread().name != "tailrace-compile":
            found.append(self)
        return compile_(self, *args, **kwargs)

    monkeypatch.setattr(jax.stages.Lowered, "compile", counting)
    return found
