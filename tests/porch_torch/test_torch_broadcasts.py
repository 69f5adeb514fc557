"""Gradients of what is broadcast in 16 bits: sums of 32 bits, as in PyTorch."""

import jax
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_torch_operations import ours
from torch import nn

import tailrace as tr
import tailrace.torch as tt
from oracles import assert_close
from tailrace.torch.calls.arrays import array_of
from tailrace.torch.torchax.broadcasts import spread

ROWS = 2048
FUNCTIONS = {
    "add": (lambda x, b: x + b, (ROWS, 3), (3,)),
    "subtract from": (lambda x, b: torch.rsub(x, b), (ROWS, 3), (3,)),
    "multiply": (lambda x, b: x * b, (ROWS, 3), (1,)),
    "in place": (lambda x, b: x.clone().add_(b), (ROWS, 3), (3,)),
    "where": (lambda x, b: torch.where(x > 0, x, b), (ROWS, 3), (3,)),
    "prelu": (F.prelu, (ROWS, 3), (3,)),
    "hypot": (torch.hypot, (ROWS, 3), (3,)),
    "addmm": (lambda x, b: torch.addmm(b, x, torch.eye(3).to(x.dtype)), (ROWS, 3), (3,)),
    "linear": (lambda x, b: F.linear(x, torch.eye(3).to(x.dtype), b), (ROWS, 3), (3,)),
    "conv1d": (lambda x, b: F.conv1d(x, torch.ones(3, 3, 1).to(x.dtype), b), (2, 3, ROWS), (3,)),
    "conv_transpose1d": (
        lambda x, b: F.conv_transpose1d(x, torch.ones(3, 3, 1).to(x.dtype), b),
        (2, 3, ROWS),
        (3,),
    ),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_are_summed_in_32_bits(name, dtype):
    function, *shapes = FUNCTIONS[name]
    torch.manual_seed(0)
    x, bias = (torch.rand(shape).to(dtype) for shape in shapes)
    total = lambda x, b: function(x, b).sum()  # noqa: E731
    _, (_, found) = ours(total, x, bias)
    wide = bias.double().requires_grad_()
    total(x.double(), wide).backward()
    assert_close(found, array_of(wide.grad.to(dtype)))


def test_only_16_bits_are_spread():
    narrow, wide = jax.numpy.ones(3, "float16"), jax.numpy.ones(3)
    assert spread(narrow, (4, 3)).shape == (4, 3)
    assert spread(wide, (4, 3)) is wide
    assert spread(narrow, (3,)) is narrow


SEARCHES = {
    "a row for all": lambda r, v: torch.searchsorted(r[0], v),
    "rows": lambda r, v: torch.searchsorted(r, v, right=True),
    "side": lambda r, v: torch.searchsorted(r, v, side="right", out_int32=True),
    "a number": lambda r, v: torch.searchsorted(r[0], 0.5),
    "unsorted": lambda r, v: torch.searchsorted(
        r.flip(-1), v, sorter=torch.arange(4, -1, -1).repeat(2, 1)
    ),
    "repeated": lambda r, v: r.repeat_interleave(torch.tensor([1, 0, 2, 1, 1]), 1, output_size=5),
    "repeated, all": lambda r, v: torch.repeat_interleave(v, 2),
    "counts": lambda r, v: torch.repeat_interleave(torch.tensor([1, 2]), output_size=3),
    "nothing to normalise": lambda r, v: F.batch_norm(r[:0, 0], None, None, training=True),
    "covariance of a row": lambda r, v: torch.cov(r[:1]) + torch.corrcoef(r[:1]),
    "powers of whole numbers": lambda r, v: (
        torch.tensor([7, -9, 2, -1, 0, 1]) ** torch.tensor([9, 9, -1, -3, 2, -2])
    ),
    "a power of whole numbers": lambda r, v: torch.arange(-5, 8) ** 9,
    "power of a number": lambda r, v: 7 ** torch.arange(10),
    "zeta": lambda r, v: torch.special.zeta(
        torch.tensor([1.0, 0.5, 2, 3, 2.5, 2]), torch.tensor([2.0, 2, -1, -0.5, -0.5, 0.25])
    ),
    "least of whole numbers": lambda r, v: torch.tensor(7).scatter_reduce(
        0, torch.tensor(0), torch.tensor(3), "amin"
    ),
}


@pytest.mark.parametrize("name", SEARCHES)
def test_forms_of_arguments(name):
    rows, values = torch.rand(2, 5).sort(-1).values, torch.rand(2, 3)
    module = nn.Module()
    module.forward = lambda r, v: SEARCHES[name](r, v) + 0
    found = tt.inference_model(module)(rows, values)
    expected = SEARCHES[name](rows, values)
    assert found.shape == expected.shape
    np.testing.assert_allclose(found.numpy(), expected.numpy(), rtol=2e-6, equal_nan=True)


def test_whole_numbers_that_do_not_fit_are_refused():
    module = nn.Module()
    module.forward = lambda x: x + torch.unravel_index(torch.tensor(3), (2**63 - 1,))[0]
    with pytest.raises(tr.TailraceError, match="Whole numbers have 32 bits on the device"):
        tt.inference_model(module)(torch.ones(2))


@pytest.mark.parametrize("padding", ["border", "zeros", "reflection"])
def test_samples_of_volumes(padding):
    torch.manual_seed(0)
    x, grid = torch.randn(1, 2, 3, 3, 3), torch.randn(1, 2, 2, 2, 3)
    sample = lambda x, g: F.grid_sample(x, g, padding_mode=padding, align_corners=False)  # noqa: E731
    grid = grid * 2  # also past the second reflection
    assert_close(ours(sample, x, grid)[0], sample(x, grid).numpy())
