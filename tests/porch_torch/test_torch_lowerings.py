"""Every core operation of ATen has a lowering, and PyTorch's own operator samples are right by them."""

import importlib.util
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from lowered_samples import captured, evaluated

import tailrace.torch.lowerings  # noqa: F401 (registers all)
from oracles import assert_close
from tailrace.torch.calls.arrays import array_of
from tailrace.torch.lowerings.composites import decompositions
from tailrace.torch.lowerings.evaluate import evaluate
from tailrace.torch.lowerings.random_numbers import is_random
from tailrace.torch.lowerings.refused import REFUSED
from tailrace.torch.lowerings.table import LOWERINGS, lowering

aten = torch.ops.aten
PATH = Path(__file__).parents[2] / "benchmarks" / "torch_operators.py"


def operations():
    """All operations of ATen; `dir(aten)` has those alone that somebody has asked for."""
    for full in torch._C._dispatch_get_all_op_names():
        space, _, name = full.partition("::")
        packet, _, overload = name.partition(".")
        if space == "aten" and hasattr(aten, packet):
            yield getattr(getattr(aten, packet), overload or "default")


def test_every_core_operation_is_lowered_or_refused():
    core = {one for one in operations() if torch.Tag.core in one.tags}
    assert len(core) > 180
    refused = core & set(REFUSED)
    assert core - set(LOWERINGS) == refused
    assert len(core) - len(refused) >= 186
    assert not set(LOWERINGS) & set(REFUSED)


def test_what_has_a_lowering_is_not_decomposed():
    kept = decompositions()
    assert kept
    assert not set(kept) & set(LOWERINGS)
    assert aten.softplus.default not in kept
    assert aten.std.dim in kept


def test_an_operation_has_one_lowering():
    with pytest.raises(ValueError, match=r"aten\.add\.Tensor has two lowerings"):
        lowering(aten.add.Tensor)(lambda x, y: x)


def test_what_draws_is_tagged_so():
    names = (
        "rand randn randint randperm bernoulli native_dropout normal_functional uniform multinomial"
    )
    for name in names.split():
        assert is_random(getattr(aten, name).default), name
    assert not is_random(aten.add.Tensor)


# -- PyTorch's samples ----------------------------------------------------------------------------

USUAL = {
    "addmm": torch.bfloat16,
    "amax": torch.float32,
    "as_strided": torch.float32,
    "cat": torch.float32,
    "clamp": torch.float32,
    "cumsum": torch.bool,
    "div (floor_rounding)": torch.float32,
    "div (trunc_rounding)": torch.int64,
    "fft.irfftn": torch.float32,
    "gather": torch.float32,
    "index_put": torch.float32,
    "max (reduction_with_dim)": torch.float32,
    "mean": torch.bfloat16,
    "nn.functional.avg_pool2d": torch.float32,
    "nn.functional.batch_norm": torch.float32,
    "nn.functional.conv2d": torch.float32,
    "nn.functional.conv_transpose2d": torch.float32,
    "nn.functional.gelu": torch.bfloat16,
    "nn.functional.grid_sample": torch.float32,
    "nn.functional.group_norm": torch.bfloat16,
    "nn.functional.interpolate (bilinear)": torch.float32,
    "nn.functional.layer_norm": torch.bfloat16,
    "nn.functional.max_pool2d": torch.float32,
    "nn.functional.pad (reflect)": torch.float32,
    "pow": torch.float32,
    "remainder": torch.int64,
    "scatter_reduce (amin)": torch.float32,
    "softmax": torch.bfloat16,
    "sort": torch.float32,
    "sub": torch.uint8,
    "sum": torch.int64,
    "topk": torch.float32,
    "unfold": torch.float32,
    "var": torch.bfloat16,
    "where": torch.bool,
}
"""Samples of each kind; all of them run with `-m exhaustive`."""


@pytest.fixture(scope="module")
def samples():
    spec = importlib.util.spec_from_file_location("torch_operators", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module, {module.full_name(op): op for op in module.operators()}


def wrong(samples, name, dtype, limit):
    module, found = samples
    rows = list(module.verdicts(found[name], dtype, limit, ("plain",), evaluated))
    return [row for row in rows if row[1] != "right"], len(rows)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", USUAL)
def test_usual_samples(samples, name):
    found, count = wrong(samples, name, USUAL[name], 1)
    assert count
    assert not found


PORTIONS = 40

DIFFERENT = {
    "as_strided_scatter": "PyTorch's gradient of entries that were replaced is not 0",
    "matrix_exp": "gradients of thousands are sums in another order",
    "sort": "PyTorch's order of equal entries is not defined",
    "linalg.householder_product": "not for matrices without columns",
}
"""Operators whose samples are not all right, and why."""

OF_VALUES = ("DynamicOutputShapeException", "DataDependentOutputException")
"""What PyTorch's own capture refuses: shapes and numbers of Python's that depend on values."""


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("portion", range(PORTIONS))
def test_all_samples(samples, portion):
    _module, found = samples
    bad = {}
    for name in sorted(found)[portion::PORTIONS]:
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
            if dtype in found[name].supported_dtypes("cpu") and name not in DIFFERENT:
                rows, _ = wrong(samples, name, dtype, 4)
                rows = [r for r in rows if r[1] != "refused" and not r[2].startswith(OF_VALUES)]
                bad.update({(name, dtype): rows} if rows else {})
        jax.clear_caches()
    assert not bad


# -- edges ----------------------------------------------------------------------------------------


def same_as_eager(function, *tensors):
    """Values, and gradients of a weighed sum, of a function of tensors; returns the values."""
    given = [t.detach().clone().requires_grad_(t.is_floating_point()) for t in tensors]
    expected = function(*given)
    arrays = [jnp.asarray(array_of(t)) for t in tensors]
    graph = captured(lambda *t: (function(*t),), [t.detach() for t in tensors])
    places = [n for n, t in enumerate(tensors) if t.is_floating_point()]
    weights = np.cos(np.arange(expected.numel())).astype(np.float32).reshape(expected.shape)

    def total(some):
        values = list(arrays)
        for place, value in zip(places, some, strict=True):
            values[place] = value
        (found,) = evaluate(graph, values, jax.random.key(0))
        return (found.astype(jnp.float32) * weights).sum(), found

    some = [arrays[place] for place in places]
    slopes, found = jax.jit(jax.grad(total, has_aux=True))(some)
    (expected.float() * torch.from_numpy(weights)).sum().backward()
    assert_close(found, array_of(expected))
    for slope, place in zip(slopes, places, strict=True):
        grad = given[place].grad
        assert_close(slope, array_of(torch.zeros_like(tensors[place]) if grad is None else grad))
    return found


NAN, INF = float("nan"), float("inf")


EDGES = {
    "amax shares": (lambda x: x.amax(0), [[1.0, 2.0], [1.0, 0.0], [1.0, 2.0]]),
    "max.dim takes the first": (lambda x: x.max(0)[0], [[1.0, 2.0], [1.0, 0.0], [1.0, 2.0]]),
    "clamp at its limits": (lambda x: x.clamp(-1, 1), [-2.0, -1.0, 0.0, 1.0]),
    "hardtanh at its limits": (torch.nn.functional.hardtanh, [-2.0, -1.0, 0.0, 1.0]),
    "abs at 0": (torch.abs, [0.0, -1.0]),
    "softplus of much": (torch.nn.functional.softplus, [1e3, 100.0, -100.0]),
    "elu of much": (torch.nn.functional.elu, [1e3, 100.0, -100.0]),
    "where beside what overflows": (
        lambda x: torch.where(x > 1, x, torch.zeros_like(x)),
        [INF, NAN, 2.0],
    ),
    "std of equal ones": (lambda x: x.std(), [2.0, 2.0]),
    "norm of nothing": (lambda x: x.norm(), [0.0, 0.0]),
    "norm of infinity": (lambda x: torch.linalg.vector_norm(x, INF), [1.0, 1.0, 0.0]),
    "xlogy at 0": (lambda x: torch.xlogy(x, x), [0.0, 1.0]),
    "pow 0": (lambda x: x**0, [0.0, 2.0]),
    "pow 2.5": (lambda x: x**2.5, [0.5, 2.0]),
    "bce at its ends": (
        lambda x: torch.nn.functional.binary_cross_entropy(x, torch.tensor([1.0, 0.0, 0.5])),
        [0.0, 1.0, 0.25],
    ),
    "safe softmax": (lambda x: torch.ops.aten._safe_softmax(x, -1), [[-INF, -INF], [0.0, 1.0]]),
    "cummax": (lambda x: x.cummax(0)[0], [1.0, 1.0, NAN, 2.0]),
}


@pytest.mark.parametrize("name", EDGES)
def test_edges(name):
    function, values = EDGES[name]
    same_as_eager(function, torch.tensor(values))


def test_a_factor_of_zero_leaves_its_term_out():
    x, y = torch.randn(2, 3), torch.randn(3, 2)
    lost = torch.full((2, 2), NAN)
    same_as_eager(lambda x, y: torch.addmm(lost, x, y, beta=0), x, y)
    same_as_eager(lambda bias: torch.addmm(bias, lost, lost, alpha=0), torch.randn(2, 2))


def test_padding_has_no_gradient():
    ids = torch.tensor([[0, 2, 2], [1, 0, 3]])
    table = torch.randn(4, 3)
    for given in ({"padding_idx": 0}, {"scale_grad_by_freq": True}, {"padding_idx": -2}):
        same_as_eager(lambda w, ids=ids, g=given: torch.nn.functional.embedding(ids, w, **g), table)


def test_sixteen_bits_are_computed_in_thirty_two():
    x = torch.randn(64, dtype=torch.bfloat16)
    found = same_as_eager(lambda x: x * 0.1, x)
    assert np.array_equal(np.asarray(found), array_of(x * 0.1))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool])
def test_whole_numbers_keep_pytorchs_dtypes(dtype):
    x = torch.tensor([0, 1, 2, 250]).to(dtype)

    def function(x):
        yield from (x.sum(), x.cumsum(0), x.prod(), x / 2, x + 1.5, x.float().mean(), x == 1)
        if dtype != torch.bool:
            yield from (x // 3, x % 3, x + 7, -x, ~x, x * True, x.clamp(1, 2), x**2)
        yield from (x & x, x | 1, x.any(), x.all(), x.argmax() if dtype != torch.bool else x.any())

    graph = captured(lambda x: tuple(function(x)), [x])
    found = evaluate(graph, [jnp.asarray(array_of(x))], jax.random.key(0))
    for one, expected in zip(found, function(x), strict=True):
        wanted = array_of(expected)
        assert one.dtype == wanted.dtype
        np.testing.assert_array_equal(np.asarray(one), wanted)
