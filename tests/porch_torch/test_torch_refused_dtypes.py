"""Dtypes that PyTorch refuses next to each other are refused here, and no others."""

import itertools

import jax
import pytest
import torch
import torch.nn.functional as F
from small_modules import Call
from torch import nn

import tailrace.torch as tt
from tailrace.errors import ProgramError
from tailrace.torch.calls.arrays import array_of, dtype_on_device
from tailrace.torch.tracing.module_function import ModuleFunction, training_modes

DTYPES = (torch.bool, torch.int64, torch.bfloat16, torch.float32)

PLACES = torch.tensor([0, 2])
MASK = torch.tensor([True, False, True])


def entries(dtype, shape):
    torch.manual_seed(1)
    return torch.randint(0, 2 if dtype == torch.bool else 3, shape).to(dtype)


def written(key):
    def write(x, y):
        x = x.clone()
        x[key] = y
        return x

    return write


ROW = torch.tensor([[0, 1, 2]])

CASES = {
    "x[places] = y": (written(PLACES), (3, 3), (2, 3)),
    "x[places] = number": (written(PLACES), (3, 3), ()),
    "x[mask] = y": (written(MASK), (3, 3), (2, 3)),
    "x[mask] = number": (written(MASK), (3, 3), ()),
    "x[mask, :1] = number": (written((MASK, slice(0, 1))), (3, 3), (1,)),
    "x[:2] = y": (written(slice(0, 2)), (3, 3), (2, 3)),
    "x[0] = y": (written(0), (3, 3), (3,)),
    "index_put": (lambda x, y: x.index_put((PLACES,), y), (3, 3), (2, 3)),
    "index_put by mask": (lambda x, y: x.index_put((MASK,), y), (3, 3), ()),
    "index_add": (lambda x, y: x.index_add(0, PLACES, y), (3, 3), (2, 3)),
    "index_copy": (lambda x, y: x.clone().index_copy_(0, PLACES, y), (3, 3), (2, 3)),
    "index_fill": (lambda x, y: x.index_fill(0, PLACES, y), (3, 3), ()),
    "scatter": (lambda x, y: x.scatter(0, ROW, y), (3, 3), (1, 3)),
    "scatter_add": (lambda x, y: x.scatter_add(0, index=ROW, src=y), (3, 3), (1, 3)),
    "masked_scatter": (lambda x, y: x.masked_scatter(MASK, y), (3, 3), (3, 3)),
    "matmul": (lambda x, y: x @ y, (3, 3), (3, 3)),
    "mm": (torch.mm, (3, 3), (3, 3)),
    "mv": (torch.mv, (3, 3), (3,)),
    "dot": (torch.dot, (3,), (3,)),
    "bmm": (torch.bmm, (2, 3, 3), (2, 3, 3)),
    "addmm": (lambda x, y: torch.addmm(x, x, y), (3, 3), (3, 3)),
    "linear": (F.linear, (3, 3), (3, 3)),
    "linear, bias": (lambda x, y: F.linear(x, x, y), (3, 3), (3,)),
    "bilinear": (lambda x, y: F.bilinear(x, x, y), (3, 3), (2, 3, 3)),
    "tensordot": (lambda x, y: torch.tensordot(x, y, 1), (3, 3), (3, 3)),
    "einsum": (lambda x, y: torch.einsum("ij,jk->ik", x, y), (3, 3), (3, 3)),
    "einsum without a sum": (lambda x, y: torch.einsum("ij,ij->ij", x, y), (3, 3), (3, 3)),
    "isclose": (torch.isclose, (3,), (3,)),
    "isin": (torch.isin, (3,), (2,)),
    "ldexp": (torch.ldexp, (3,), (3,)),
    "gather": (lambda x, y: x.gather(0, y), (3, 3), (1, 3)),
    "index_select": (lambda x, y: x.index_select(0, y), (3, 3), (2,)),
    "take": (torch.take, (3, 3), (2,)),
    "embedding": (lambda x, y: F.embedding(y, x), (6, 3), (2,)),
    "torch.embedding": (torch.embedding, (6, 3), (2,)),
    "cross_entropy": (F.cross_entropy, (3, 5), (3,)),
    "cross_entropy, shares": (F.cross_entropy, (3, 5), (3, 5)),
    "nll_loss": (F.nll_loss, (3, 5), (3,)),
    "binary_cross_entropy": (
        lambda x, y: F.binary_cross_entropy(torch.zeros_like(x), torch.zeros_like(y)),
        (3,),
        (3,),
    ),
    "attention": (lambda x, y: F.scaled_dot_product_attention(x, x, y), (1, 3, 4), (1, 3, 4)),
    "layer_norm": (lambda x, y: F.layer_norm(x, (3,), y, y), (3, 3), (3,)),
    "group_norm": (lambda x, y: F.group_norm(x, 1, y, y), (3, 3), (3,)),
    "batch_norm": (lambda x, y: F.batch_norm(x, None, None, y, y, True), (3, 3), (3,)),
    "cdist": (torch.cdist, (3, 5), (3, 5)),
    "complex": (torch.complex, (3,), (3,)),
}
"""name: (function of two tensors, their shapes)"""


def of_pytorch(function, given):
    """PyTorch's result, or its error."""
    try:
        with torch.no_grad():
            return function(*(t.clone() for t in given)), None
    except (RuntimeError, IndexError, ValueError) as error:
        return None, error


USUAL = ("x[places] = y", "x[mask] = number", "index_fill", "scatter", "matmul", "linear", "einsum")


@pytest.mark.parametrize(
    "name", [n if n in USUAL else pytest.param(n, marks=pytest.mark.exhaustive) for n in CASES]
)
@pytest.mark.filterwarnings("ignore")
def test_what_pytorch_refuses_is_refused(name):
    function, *shapes = CASES[name]
    wrong = {}
    for pair in itertools.product(DTYPES, DTYPES):
        given = [entries(*one) for one in zip(pair, shapes, strict=True)]
        expected, refused = of_pytorch(function, given)
        if "cdist" in name and "not implemented" in str(refused):
            continue  # a kernel that CPUs lack
        try:
            found, error = shape_of(function, given), None
        except ProgramError as one:
            found, error = None, one
        if refused is not None or error is not None:
            if (refused is None) != (error is None):
                wrong[pair] = (refused, error)
        elif found.dtype != dtype_on_device(expected.dtype):
            wrong[pair] = (expected.dtype, found.dtype)
    assert not wrong


def shape_of(function, given):
    """The form of our result; nothing is computed."""
    module = Call(function)
    run = ModuleFunction(module, training_modes(module))

    def ours(*arrays):
        fill = lambda wrap: (tuple(wrap(a) for a in arrays), {})  # noqa: E731
        return run({}, {}, fill, jax.random.key(0)).outputs

    return jax.eval_shape(ours, *(jax.numpy.asarray(array_of(t)) for t in given))


TEXTS = {
    r"mm takes tensors of one dtype\. Received: float32 and bfloat16\. Cast one": (
        lambda x: torch.mm(x, x.bfloat16())
    ),
    r"x\[index\] = value takes tensors of one dtype\. Received: float32 and int32": (
        lambda x: written(PLACES)(x, torch.ones(2, 3).long())
    ),
    r"index of gather is of int64 or int32\. Received: int16\. Cast it": (
        lambda x: x.gather(0, ROW.short())
    ),
    "uint8 as an index is a mask in PyTorch": lambda x: x[torch.ones(3).byte()],
    r"Tensors used as indices are of int64, int32 or bool\. Received: int8": (
        lambda x: x[PLACES.to(torch.int8)]
    ),
    "matmul has no booleans": lambda x: (x > 0) @ (x > 0),
    "cross_entropy is a function of floats": lambda x: F.cross_entropy(x.long(), PLACES),
    r"Classes of nll_loss are of dtype int64 or uint8\. Received: bool": lambda x: F.nll_loss(
        x, MASK
    ),
    r"parameters of layer_norm have the dtype of its input": (
        lambda x: F.layer_norm(x, (3,), x[0].bfloat16())
    ),
}


@pytest.mark.parametrize("text", TEXTS)
def test_the_sentence_says_the_rule(text):
    with pytest.raises(ProgramError, match=text):
        shape_of(TEXTS[text], [torch.ones(3, 3)])


def test_modules_say_where():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(3, 2, dtype=torch.bfloat16)

        def forward(self, x):
            return self.inner(x)

    with pytest.raises(ProgramError, match="module 'inner' of Mixed: linear takes tensors of one"):
        tt.inference_model(Mixed())(torch.ones(4, 3))


def test_autocast_gives_stored_entries_the_widest_dtype():
    x, y = torch.zeros(3, 3), torch.ones(2, 3)

    def copied(x, y):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return x.index_copy(0, PLACES, y.bfloat16()) + (x @ x).float()

    assert torch.equal(tt.inference_model(Call(copied))(x, y), copied(x, y))
