"""Results are PyTorch's: promotion of every pair of dtypes, `dtype=` and `out=` of every kind."""

import itertools

import jax
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from small_modules import Call

from oracles import assert_close
from tailrace.errors import ProgramError
from tailrace.torch.calls.arrays import array_of, dtype_on_device
from tailrace.torch.tracing.module_function import ModuleFunction, training_modes

DTYPES = (
    *(torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32),
)


def check(function, given):
    """A function of a dict of tensors returns a dict of tensors with PyTorch's dtypes and values."""
    module = Call(function)
    run = ModuleFunction(module, training_modes(module))
    arrays = {name: jax.numpy.asarray(array_of(t)) for name, t in given.items()}

    def ours(arrays):
        fill = lambda wrap: (({name: wrap(a) for name, a in arrays.items()},), {})  # noqa: E731
        return run({}, {}, fill, jax.random.key(0)).outputs

    found = jax.jit(ours)(arrays)
    expected = function({name: t.clone() for name, t in given.items()})
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        assert found[name].dtype == dtype_on_device(value.dtype), name
        assert found[name].shape == tuple(value.shape), name
        try:
            # The device wraps around at 32 bits, where PyTorch has 64.
            value = value.int() if value.dtype == torch.int64 else value
            assert_close(np.asarray(found[name]), array_of(value))
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None


def values(dtype, shape=(3,)):
    torch.manual_seed(1)
    whole = torch.randint(0, 2 if dtype == torch.bool else 5, shape)
    return whole.to(dtype)


BINARY = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": lambda a, b: torch.div(a, b + 1),
    "floor": lambda a, b: torch.div(a, b + 1, rounding_mode="floor"),
    "maximum": torch.maximum,
    "less": torch.lt,
    "equal": torch.eq,
    "where": lambda a, b: torch.where(a > b, a, b),
    "cat": lambda a, b: torch.cat([a.reshape(-1), b.reshape(-1)]),
    "scalar": lambda a, b: (a + 1, a * 0.5, a / 2),
    "result_type": lambda a, b: torch.zeros(2, dtype=torch.result_type(a, b)),
}


@pytest.mark.parametrize("name", BINARY)
def test_promotion_of_every_pair(name):
    function = BINARY[name]
    given = {
        f"{dtype}"[6:] + kind: values(dtype, shape)
        for dtype in DTYPES
        for kind, shape in (("", (3,)), ("-0", ()))
    }

    def all_pairs(given):
        out = {}
        for (a, x), (b, y) in itertools.product(given.items(), repeat=2):
            if name == "sub" and torch.bool in (x.dtype, y.dtype):
                continue  # PyTorch refuses
            made = function(x, y)
            for number, one in enumerate(made if isinstance(made, tuple) else (made,)):
                out[f"{a} {name} {b} {number}"] = one
        return out

    check(all_pairs, given)


ALL_DTYPES = (*DTYPES, torch.int16, torch.float64)


@pytest.mark.parametrize("name", ["add", "div", "where"])
def test_dtypes_of_every_pair(name):
    """Of all dtypes, those of 64 bits with others included; nothing is computed."""
    given = {
        f"{dtype}"[6:] + kind: torch.ones(shape, dtype=dtype)
        for dtype in ALL_DTYPES
        for kind, shape in (("", (3,)), ("-0", ()))
    }
    function = BINARY[name] if name != "where" else lambda a, b: torch.where(a == b, a, b)

    def all_pairs(given):
        pairs = itertools.product(given.items(), repeat=2)
        return {f"{a} {name} {b}": function(x, y) for (a, x), (b, y) in pairs}

    module = Call(all_pairs)
    run = ModuleFunction(module, training_modes(module))

    def ours(arrays):
        fill = lambda wrap: (({name: wrap(a) for name, a in arrays.items()},), {})  # noqa: E731
        return run({}, {}, fill, jax.random.key(0)).outputs

    found = jax.eval_shape(ours, {name: array_of(t) for name, t in given.items()})
    wrong = {
        pair: (found[pair].dtype, value.dtype)
        for pair, value in all_pairs(given).items()
        if found[pair].dtype != dtype_on_device(value.dtype)
    }
    assert not wrong


def test_booleans_stay_booleans():
    def some(given):
        a, b = given["a"], given["b"]
        return {"sum": a + b, "not": ~(a + b), "product": a * b}

    check(some, {"a": values(torch.bool), "b": ~values(torch.bool)})


def test_whole_numbers_that_do_not_fit_wrap_around():
    def all_casts(given):
        x = given["x"]
        kinds = (torch.uint8, torch.int8, torch.int16)
        found = {f"{kind}": x.to(kind) for kind in kinds}
        return {**found, "copied": torch.zeros(6, dtype=torch.uint8).copy_(x), "byte": x.byte()}

    check(all_casts, {"x": torch.tensor([-1.5, -200.0, 130.7, 300.2, 70000.0, 0.9])})


TOGETHER = {
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "fmax": torch.fmax,
    "clamp": lambda a, b: torch.clamp(a, min=b),
    "less": torch.lt,
    "equal": torch.eq,
    "floor": torch.floor_divide,
    "trunc": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "remainder": torch.remainder,
    "fmod": torch.fmod,
    "shifted": torch.bitwise_right_shift,
    "and": torch.bitwise_and,
    "where": lambda a, b: torch.where(a < b, a, b),
    "multiplied": lambda a, b: torch.addcmul(a, b, b),
    "power": lambda a, b: torch.pow(a, b),
    "in place": lambda a, b: a.clone().remainder_(b),
}


@pytest.mark.parametrize("name", TOGETHER)
def test_numbers_without_dimensions_become_what_they_are_next_to(name):
    """-1 next to bytes is 255, in what compares and divides as well."""
    given = {
        "bytes": torch.tensor([1, 7, 255], dtype=torch.uint8),
        "int8": torch.tensor([-128, -1, 127], dtype=torch.int8),
        "byte": torch.tensor(200, dtype=torch.uint8),
        "-1": torch.tensor(-1),
        "300": torch.tensor(300, dtype=torch.int16),
    }

    def all_pairs(given):
        out = {}
        for (a, x), (b, y) in itertools.product(given.items(), repeat=2):
            refused = name == "in place" and y.ndim and not x.ndim
            if not refused and (name, b) != ("power", "-1"):
                out[f"{a} {name} {b}"] = TOGETHER[name](x, y)
        return out

    check(all_pairs, given)


def test_whole_numbers_become_infinite_next_to_half_ones():
    given = {"n": torch.tensor([70000, 3]), "x": torch.tensor([3.0, 2.0], dtype=torch.float16)}
    check(lambda given: {"left": torch.remainder(given["n"], given["x"])}, given)


def test_running_sums_of_bytes_are_wide():
    def sums(given):
        x = given["x"]
        masks = (x > 9).cumsum(0)
        return {
            "sum": x.cumsum(0),
            "product": x.cumprod(0),
            "masks": masks,
            "as": x.cumsum(0, dtype=x.dtype),
        }

    check(sums, {"x": torch.tensor([1, 200, 100, 3], dtype=torch.uint8)})


def test_a_number_is_copied_into_a_tensor():
    check(lambda given: {"x": given["x"].clone().copy_(3)}, {"x": torch.randn(2)})


def test_powers_of_whole_numbers_have_every_bit_of_the_exponent():
    def powers(given):
        x, n = given["x"], given["n"]
        return {"tensors": x**n, "numbers": x**70, "zero": x**64}

    check(powers, {"x": torch.tensor([0, 1, -1, 2, 3]), "n": torch.tensor([64, 99, 77, 65, 20])})


REFUSED = {
    "negative": (lambda b, x: -(b > 1), "Negation, the `-` operator, on a bool tensor"),
    "masks": (lambda b, x: (b > 1) - (b > 2), "Subtraction, .* with two bool tensors"),
    "1 - mask": (lambda b, x: 1 - (b > 1), "Subtraction, .* with a bool tensor"),
    "x - True": (lambda b, x: x - True, "Subtraction, .* with a bool tensor"),
    "full": (lambda b, x: b + torch.full((3,), 300, dtype=torch.uint8), "without overflow"),
    "clamp": (lambda b, x: b.clamp(max=300), "without overflow"),
    "power": (lambda b, x: b**-1, "Integers to negative integer powers are not allowed"),
    "floor": (lambda b, x: (b > 1) // (b > 0), "not implemented for 'Bool'"),
    "floor in place": (lambda b, x: (b > 1).floor_divide_(b), "can't be cast"),
    "lerp": (lambda b, x: torch.lerp(x, x.half(), 0.5), "expected dtype float for `end`"),
    "heaviside": (lambda b, x: torch.heaviside(x, b), "tensors with different dtypes"),
    "mean": (lambda b, x: b.mean(), "could not infer output dtype"),
    "deviation": (lambda b, x: torch.std(b, 0), "std and var only support floating point"),
    "norm": (lambda b, x: torch.linalg.vector_norm(b), "Expected a floating point or complex"),
    "softmax": (lambda b, x: torch.softmax(b, 0), "not implemented for 'Byte'"),
    "largest": (lambda b, x: (b > 1).argmax(), "does not support bool"),
    "fill": (lambda b, x: x.clone().fill_(x), "0-dimension value tensor but got .* 1 dim"),
    "half in place": (lambda b, x: x.half().sum().add_(x.half()), "fewer dimensions"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_pytorch_refuses_is_refused(name):
    function, text = REFUSED[name]
    given = {"b": torch.tensor([1, 2, 3], dtype=torch.uint8), "x": torch.randn(3)}
    with pytest.raises(RuntimeError):
        function(given["b"], given["x"])
    with pytest.raises(ProgramError, match=text):
        check(lambda given: {"out": function(given["b"], given["x"])}, given)


LISTS = {
    "a float after a whole number": [1, 2.5],
    "a number after a boolean": [True, 2],
    "nested": [[1, 2], [3, 4.5]],
    "large whole numbers of NumPy": np.array([2**24 + 1]),
    "a number of NumPy": np.float64(2.5),
    "a range": range(3),
    "nothing": [],
}


@pytest.mark.filterwarnings("ignore:To copy construct")
@pytest.mark.filterwarnings("ignore:Converting a tensor")
@pytest.mark.parametrize("make", [torch.tensor, torch.as_tensor, torch.asarray])
def test_numbers_become_tensors_of_pytorchs_dtype(make):
    def all_lists(given):
        x, n = given["x"], given["n"]
        found = {name: make(data) for name, data in LISTS.items()}
        found |= {
            "half": make(np.ones(2), dtype=torch.float16),
            "cut": make(3.5, dtype=torch.int32),
        }
        if make is not torch.asarray:  # it takes no tensors in lists
            found |= {"with a tensor": make([x[0], 2]), "whole": make([n[0], 3])}
        return {**found, "a tensor": make(x), "in another dtype": make(x, dtype=torch.float16)}

    check(all_lists, {"x": torch.randn(3), "n": torch.arange(3, dtype=torch.int32)})


def test_several_results_written_elsewhere_have_names():
    def written(given):
        x = given["x"]
        out = torch.empty(3), torch.empty(3, dtype=torch.int64)
        return {"values": torch.max(x, 1, out=out).values, "indices": torch.sort(x, 1).indices}

    check(written, {"x": torch.randn(3, 4)})


REDUCTIONS = {
    "sum": torch.sum,
    "sum of a dim": lambda x, dtype: torch.sum(x, 0, dtype=dtype),
    "sum, method": lambda x, dtype: x.sum(0, True, dtype=dtype),
    "nansum": torch.nansum,
    "mean": torch.mean,
    "mean of a dim": lambda x, dtype: x.mean((0, 1), dtype=dtype),
    "nanmean": torch.nanmean,
    "prod": torch.prod,
    "prod of a dim": lambda x, dtype: torch.prod(x, 1, dtype=dtype),
    "cumsum": lambda x, dtype: torch.cumsum(x, 1, dtype=dtype),
    "cumprod": lambda x, dtype: torch.cumprod(x, 1, dtype=dtype),
    "softmax": lambda x, dtype: torch.softmax(x, 1, dtype=dtype),
    "F.softmax": lambda x, dtype: F.softmax(x, 1, dtype=dtype),
    "log_softmax": lambda x, dtype: torch.log_softmax(x, 1, dtype=dtype),
    "softmin": lambda x, dtype: F.softmin(x, 1, dtype=dtype),
    "norm": lambda x, dtype: torch.norm(x, 2, 1, dtype=dtype),
    "vector_norm": lambda x, dtype: torch.linalg.vector_norm(x, dtype=dtype),
    "matrix_norm": lambda x, dtype: torch.linalg.matrix_norm(x, dtype=dtype),
    "zeros_like": torch.zeros_like,
    "full_like": lambda x, dtype: torch.full_like(x, 3, dtype=dtype),
    "new_full": lambda x, dtype: x.new_full((2,), 3, dtype=dtype),
    "to": lambda x, dtype: x.to(dtype),
    "arange": lambda x, dtype: torch.arange(x.shape[1], dtype=dtype),
    "linspace": lambda x, dtype: torch.linspace(0, 1, 5, dtype=dtype),
}


@pytest.mark.parametrize("name", REDUCTIONS)
def test_dtype_is_the_dtype_of_the_computation(name):
    function = REDUCTIONS[name]
    # In half the sum of these would be infinite.
    given = {
        "x": torch.full((2, 70000), 1.0, dtype=torch.float16),
        "small": torch.ones(2, 3).half(),
    }

    def some(given):
        of = given["x"] if name in ("sum", "sum of a dim", "nansum", "mean") else given["small"]
        wide = {"wide": function(of, dtype=torch.float32)}
        if "norm" in name:
            return wide  # PyTorch refuses a dtype that is not wider
        return {**wide, "bfloat16": function(given["small"], dtype=torch.bfloat16)}

    check(some, given)


OUTS = {
    "add": lambda a, b, out: torch.add(a, b, alpha=2, out=out),
    "bucketize": lambda a, b, out: torch.bucketize(a, b[0].sort().values, out=out),
    "cat": lambda a, b, out: torch.cat([a, b], out=out),
    "cumprod": lambda a, b, out: torch.cumprod(a, 0, out=out),
    "exp": lambda a, b, out: torch.exp(a, out=out),
    "gather": lambda a, b, out: torch.gather(a, 0, (b > 0).long(), out=out),
    "matmul": lambda a, b, out: torch.matmul(a, b.t(), out=out),
    "mm": lambda a, b, out: torch.mm(a, b.t(), out=out),
    "softmax": lambda a, b, out: torch.softmax(a, 1, out=out),
    "sum": lambda a, b, out: torch.sum(a, 1, out=out),
    "take_along_dim": lambda a, b, out: torch.take_along_dim(a, (b > 0).long(), 0, out=out),
    "where": lambda a, b, out: torch.where(a > b, a, b, out=out),
}


@pytest.mark.parametrize("name", OUTS)
def test_out_is_written(name):
    function = OUTS[name]

    def some(given):
        a, b = given["a"], given["b"]
        kind = torch.int64 if name == "bucketize" else torch.float32
        empty = torch.empty(0, dtype=kind)
        same = function(a, b, empty)
        assert same is empty
        fits = torch.zeros(empty.shape, dtype=kind)
        function(a, b, fits)
        return {"resized": empty, "written": fits, "used": fits + 1}

    check(some, {"a": torch.randn(2, 3), "b": torch.randn(2, 3)})


def test_several_outs_and_slices():
    def some(given):
        x = given["x"]
        values, places = torch.empty(0), torch.empty(0, dtype=torch.int64)
        torch.max(x, 1, out=(values, places))
        table = torch.zeros(3, 4)
        torch.mul(x[0], 2, out=table[1])
        return {"values": values, "places": places, "table": table}

    check(some, {"x": torch.randn(3, 4)})


def test_out_of_a_narrower_kind_is_refused():
    def some(given):
        torch.add(given["x"], 1, out=torch.empty(3, dtype=torch.int64))
        return {}

    with pytest.raises(ProgramError, match="result type float32 can't be cast"):
        check(some, {"x": torch.randn(3)})


@pytest.mark.parametrize("norm", ["layer", "group"])
def test_norms_of_half_inputs_with_float_weights_are_half(norm):
    def some(given):
        x, w = given["x"], given["w"]
        out = F.layer_norm(x, (4,), w, w) if norm == "layer" else F.group_norm(x, 2, w, w)
        return {"out": out}

    check(some, {"x": torch.randn(3, 4).half(), "w": torch.randn(4)})
