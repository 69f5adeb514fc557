"""What is relied on of PyTorch and torchax beyond their public interfaces."""

import pytest

from tailrace.errors import VersionError
from tailrace.torch.torchax import versions

torch = pytest.importorskip("torch")
internals = pytest.importorskip("tailrace.torch.torch_internals")


@pytest.fixture(autouse=True)
def _loaded():
    versions.environment()


@pytest.mark.parametrize("seam", [*internals.TORCH, *internals.TORCHAX], ids=lambda seam: seam.name)
def test_every_seam_is_as_known(seam):
    assert seam.probe()


@pytest.mark.parametrize(
    ("owner", "name", "text"),
    [
        ("torch._C", "DisableTorchFunction", "the switch of torch functions has changed"),
        ("torchax.view", "View", "the class of views has changed"),
    ],
)
def test_a_change_says_which_versions_go_together(monkeypatch, owner, name, text):
    import importlib

    monkeypatch.delattr(importlib.import_module(owner), name)
    together = "torch >=2.11,<2.14 together with torchax >=0.0.13,<0.0.14."
    with pytest.raises(VersionError, match=f"{text}.* {together}"):
        internals.check(versions.together())
