"""What is not here says what to use instead."""

import importlib

import pytest

import tailrace as tr
from tailrace.compat import ipu
from tailrace.compat.ipu.settings.absent import INSTEAD


@pytest.mark.parametrize("full", INSTEAD)
def test_absent_names_say_what_to_use(full):
    module, _, name = full.rpartition(".")
    holder = importlib.import_module(f"tailrace.compat.{module}")
    with pytest.raises(NotImplementedError, match=f"{full} is not available") as caught:
        getattr(holder, name)
    assert isinstance(caught.value, tr.TailraceError)


def test_importing_an_absent_name_says_so_too():
    with pytest.raises(NotImplementedError, match="tr.distributed"):
        from tailrace.compat.ipu import horovod  # noqa: F401
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = ipu.nothing
    with pytest.raises(ImportError):
        from tailrace.compat.ipu.optimizers import Nothing  # noqa: F401
