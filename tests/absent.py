"""Rooms of tests whose library is not installed are skipped, with a reason."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

NEEDS = {
    "modules": ("flax", "equinox"),
    "porch_keras": ("keras",),
    "runs": ("zarr",),
    "page": ("zarr",),
    "profiling": ("perfetto",),
    "test_page_server.py": ("zarr", "starlette", "uvicorn"),
    "test_page_browser.py": ("zarr", "starlette", "uvicorn", "playwright"),
    "test_front_ends_write.py": ("keras", "torch", "torchax", "zarr"),
    "test_front_ends.py": ("zarr", "safetensors"),
    "porch_torch": ("torch", "torchax"),
}
"""Folder or file: what it imports."""


def missing(path: Path) -> list[str]:
    """What the tests of this file need and this environment has not."""
    needs = NEEDS.get(path.name) or NEEDS.get(path.parent.name, ())
    return [name for name in needs if find_spec(name) is None]


class AbsentModule(pytest.File):
    """A file that is not imported."""

    def collect(self) -> list[pytest.Item]:
        """Skip, and say why."""
        pytest.skip(f"not installed: {', '.join(missing(self.path))}", allow_module_level=True)
