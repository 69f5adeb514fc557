"""PyTorch's own operator samples through the tracing of `tailrace.torch`, against eager PyTorch.

    python -m benchmarks.torch_operators [--samples N] [--only NAME,...] [--save FILE]

The samples are those of `torch.testing._internal.common_methods_invocations.op_db`. Each runs as the
forward pass of a module: traced by `ModuleFunction`, as a model of `tt` is, and compiled by `jax.jit`,
without the compiler's optimizations, which would take most of the time. Where PyTorch has a gradient,
that of a weighed sum of the outputs is compared as well; of the first sample also the forms that write
in place and into `out=`.

- right: shapes, dtypes and values are PyTorch's. 64-bit dtypes have 32 bits on the device. Values are
  compared by PyTorch's tolerance for the dtype, or are as near to the float64 result as PyTorch's own.
  Operators that draw random numbers, or leave memory as it was, are compared by shape and dtype.
- refused: a sentence names the operation, or says that a shape would depend on values.
- crashed: another error. wrong: anything else.

Subprocesses take a few operators each, with a time limit.
"""

import argparse
import collections
import concurrent.futures
import json
import math
import os
import subprocess
import sys
import tempfile
import types
import unittest
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from tailrace.torch.calls.arrays import array_of, tensor_of
from tailrace.torch.calls.containers import flatten, rebuild
from tailrace.torch.tracing.module_function import ModuleFunction, training_modes

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool)
FORMS = ("plain", "in place", "out=")

# fmt: off
OUTSIDE = (
    "jiterator", "sparse.", "to_sparse", "nonzero_static", "torch.ops.", "_segment_reduce",
    "_softmax_backward", "item", "equal", "allclose", "_chunk_cat", "fbgemm", "_upsample",
    "_native", "_batch_norm", "native_", "resize_", "max_pool2d_with_indices_backward",
    "nn.functional._scaled",
)
# fmt: on
"""What a module does not contain: other layouts of memory, kernels of a device, values for Python,
parts of backward passes."""

TIES = ("kthvalue", "mode", "topk", "nn.functional.max_pool", "nn.functional.adaptive_max_pool")
"""Of several equal entries, which one's index is returned is not defined by PyTorch."""

DRAWS = (
    *("bernoulli", "cauchy", "empty", "exponential", "geometric", "log_normal", "multinomial"),
    *(
        "new_empty",
        "nn.functional.rrelu",
        "normal",
        "pca_lowrank",
        "rand",
        "svd_lowrank",
        "uniform",
    ),
)
"""What draws random numbers, or shows memory as it was; also what differs between two seeds."""

REFUSALS = (
    "cannot run on the device",
    "depend on",
    "branch on",
    "cannot look at the value",
    "has no ",
)

COMPILER = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def operators() -> list[Any]:
    """PyTorch's operators with their samples; those that a module can contain."""
    if "expecttest" not in sys.modules:  # asked for by PyTorch's tests, which do not run here
        stub: Any = types.ModuleType("expecttest")
        stub.TestCase = unittest.TestCase
        sys.modules["expecttest"] = stub
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
    return [op for op in op_db if not full_name(op).startswith(OUTSIDE)]


def full_name(op: Any) -> str:
    return f"{op.name} ({op.variant_test_name})" if op.variant_test_name else op.name


def verdicts(
    op: Any,
    dtype: torch.dtype,
    limit: int,
    forms: Sequence[str] = FORMS,
    run: Callable[..., Any] | None = None,
) -> Iterator[tuple[str, str, str]]:
    """(form, verdict, what was found) of some samples of an operator, evenly among all of them; by
    another way than the tracing of `tt` if `run` is given."""
    grads = op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")
    torch.manual_seed(0)
    samples = list(op.sample_inputs("cpu", dtype, requires_grad=grads))
    chosen = samples[:: math.ceil(len(samples) / limit)] if limit and samples else samples
    for number, sample in enumerate(chosen):
        for form in forms[: 3 if number == 0 else 1]:
            found = verdict(op, sample, form, grads and form == "plain", run or ours)
            if found is not None:
                yield form, *found


def verdict(
    op: Any, sample: Any, form: str, grads: bool, run: Callable[..., Any]
) -> tuple[str, str] | None:
    """How one sample fares; None where PyTorch itself cannot run it."""
    function = in_form(op, sample, form)
    tensors = [t for _, t in flatten((sample.input, sample.args, sample.kwargs)) if is_tensor(t)]
    if function is None or any(t.layout != torch.strided for t in tensors):
        return None
    try:
        expected, again = (plainly(function, sample, grads, seed=seed) for seed in (0, 1))
    except Exception:
        return None
    if not expected[0]:
        return None  # no tensors come out
    try:
        found = run(function, sample, expected[2])
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        named = any(part in text for part in REFUSALS)
        return "refused" if named else "crashed", text[:400]
    draws = op.name.startswith(DRAWS) or sample.kwargs.get("dropout_p")
    draws = draws or ("dropout" in op.name and sample.kwargs.get("training", True))
    draws = draws or (
        "attention" in op.name and any(isinstance(a, float) and a for a in sample.args)
    )
    if draws or any(not close(a, b) for a, b in zip(expected[0], again[0], strict=True)):
        expected, found = shapes_only(expected), shapes_only(found)
    coarse = not expected[0][0].is_floating_point() or expected[0][0].dtype.itemsize == 2
    if op.name.startswith(TIES) and coarse:
        expected, found = first_only(expected), first_only(found)
    wrong = difference(found, expected, lambda: exactly(function, sample, grads))
    return ("wrong", wrong[:400]) if wrong else ("right", "")


def in_form(op: Any, sample: Any, form: str) -> Callable[..., Any] | None:
    if form == "out=":
        return out_of(op) if op.supports_out else None
    if form == "in place":
        return in_place(op) if op.inplace_variant and is_tensor(sample.input) else None
    return op.op


def in_place(op: Any) -> Callable[..., Any]:
    return lambda x, *args, **kwargs: op.inplace_variant(x.clone(), *args, **kwargs)


def out_of(op: Any) -> Callable[..., Any]:
    """The operator into tensors of the right dtype, whose values and shapes it replaces."""

    def run(*args: Any, **kwargs: Any) -> Any:
        out = op.op(*args, **kwargs)
        places = rebuild(out, lambda t: torch.empty_like(t) if is_tensor(t) else t)
        op.op(*args, **kwargs, out=places)
        return places

    return run


def is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


# -- the two programs -----------------------------------------------------------------------------


def weights(count: int) -> np.ndarray:
    return np.cos(np.arange(count)).astype(np.float32)


def plainly(function: Any, sample: Any, grads: bool, dtype: Any = None, seed: int = 0) -> Any:
    """(outputs, gradients, which outputs have one) in eager PyTorch."""
    torch.manual_seed(seed)
    inputs: list[torch.Tensor] = []

    def copy(value: Any) -> Any:
        if not is_tensor(value):
            return value
        fresh = value.detach().clone()
        if dtype is not None and value.is_floating_point():
            fresh = fresh.to(dtype)
        if grads and value.requires_grad:
            inputs.append(fresh.requires_grad_())
            return fresh.view_as(fresh)
        return fresh

    given, args, kwargs = rebuild((sample.input, sample.args, sample.kwargs), copy)
    with warnings.catch_warnings(), torch.set_grad_enabled(grads):
        warnings.simplefilter("ignore")
        out = sample.output_process_fn_grad(function(given, *args, **kwargs))
    leaves = [t for _, t in flatten(out) if is_tensor(t)]
    reached = [t.requires_grad for t in leaves]
    if any(reached):
        total: Any = 0
        for leaf, one in zip(leaves, reached, strict=True):
            if one:
                parts = torch.view_as_real(leaf.resolve_conj()) if leaf.is_complex() else leaf
                wide = parts.to(torch.promote_types(parts.dtype, torch.float32)).ravel()
                total = total + (wide * torch.as_tensor(weights(wide.numel())).to(wide.dtype)).sum()
        total.backward()
    found = [t.grad if t.grad is not None else torch.zeros_like(t) for t in inputs]
    return [t.detach() for t in leaves], found if any(reached) else [], (reached, bool(inputs))


def exactly(function: Any, sample: Any, grads: bool) -> Any:
    """The same in float64."""
    return plainly(function, sample, grads, torch.float64)


def first_only(found: Any) -> Any:
    """Without the indices, and the gradient, which is that of the entry an index names."""
    return (found[0][:1], [], *found[2:])


class Called(torch.nn.Module):
    def __init__(self, function: Any, after: Any) -> None:
        super().__init__()
        self.function, self.after = function, after

    def forward(self, given: Any, args: Any, kwargs: Any) -> Any:
        return self.after(self.function(given, *args, **kwargs))


def ours(function: Any, sample: Any, reached: Any) -> Any:
    """The same through the tracing of `tt`."""
    module = Called(function, sample.output_process_fn_grad)
    run = ModuleFunction(module, training_modes(module))
    which, differentiated = reached
    leaves = [t for _, t in flatten((sample.input, sample.args, sample.kwargs)) if is_tensor(t)]
    arrays = [jnp.asarray(array_of(t.detach().resolve_conj().resolve_neg())) for t in leaves]
    moved = [number for number, t in enumerate(leaves) if t.requires_grad and differentiated]

    def total(some: list[Any], arrays: list[Any]) -> Any:
        given = list(arrays)
        for number, value in zip(moved, some, strict=True):
            given[number] = value

        def fill(wrap: Any) -> Any:
            values = iter(given)
            same = (sample.input, sample.args, sample.kwargs)
            return rebuild(same, lambda v: wrap(next(values)) if is_tensor(v) else v), {}

        outputs = run({}, {}, fill, jax.random.key(0)).outputs
        leaves = [value for _, value in flatten(outputs)]
        found = [jnp.asarray(array_of(v)) if is_tensor(v) else v for v in leaves]
        found = [value for value in found if isinstance(value, jax.Array)]
        size: Any = 0.0
        with jax.numpy_dtype_promotion("standard"):
            for leaf, one in zip(found, which, strict=False):
                if one and jnp.iscomplexobj(leaf):
                    pairs = jnp.stack([leaf.real, leaf.imag], -1).ravel()
                    size += (pairs * weights(pairs.size)).sum()
                elif one:
                    size += (leaf.astype(jnp.float32).ravel() * weights(leaf.size)).sum()
        return size, found

    if any(which):
        program = jax.grad(total, has_aux=True)
    else:
        program = lambda some, arrays: ([], total(some, arrays)[1])  # noqa: E731
    some = [arrays[number] for number in moved]
    lowered = jax.jit(program).lower(some, arrays)
    slopes, found = lowered.compile(compiler_options=COMPILER)(some, arrays)
    return [tensor_of(value) for value in found], [tensor_of(value) for value in slopes]


# -- the comparison -------------------------------------------------------------------------------

NARROWED = {
    torch.int64: torch.int32,
    torch.float64: torch.float32,
    torch.complex128: torch.complex64,
}


TOLERANCE = {
    torch.float32: (2e-5, 1e-5),
    torch.complex64: (2e-5, 1e-5),
    torch.float16: (4e-3, 4e-4),
    torch.bfloat16: (3e-2, 3e-3),
}
"""dtype: (relative, absolute). Gradients in 16 bits may be sums in 16 bits of larger parts."""


def shapes_only(found: Any) -> Any:
    return ([torch.zeros_like(t) for t in found[0]], [], *found[2:])


def difference(found: Any, expected: Any, truth: Callable[[], Any]) -> str:
    """Where two results differ; an empty string where they do not."""
    exact = None
    for kind, mine, theirs in zip(("output", "gradient"), found[:2], expected[:2], strict=True):
        if len(mine) != len(theirs):
            return f"{len(mine)} {kind}s, expected {len(theirs)}"
        for number, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            b = b.resolve_conj().resolve_neg()
            wanted = NARROWED.get(b.dtype, b.dtype)
            if a.dtype != wanted:
                return f"{kind} {number}: {a.dtype}, expected {wanted}"
            if a.shape != b.shape:
                return f"{kind} {number}: shape {list(a.shape)}, expected {list(b.shape)}"
            if b.dtype == torch.int64:
                b = in_32_bits(b)
            slack = (
                2 * torch.finfo(a.dtype).eps if kind == "gradient" and a.dtype.itemsize == 2 else 0
            )
            if close(a, b, slack):
                continue
            try:
                exact = exact or truth()
                c = exact[0 if kind == "output" else 1][number]
                if close(a, c.to(a.dtype), slack) or nearer(a, b, c):
                    continue
            except Exception:
                exact = None
            return f"{kind} {number}: {shown(a)}, expected {shown(b)}"
    return ""


def in_32_bits(x: torch.Tensor) -> torch.Tensor:
    """What 32 bits make of whole numbers: sums and products overflow, the largest is the largest."""
    wide, narrow = torch.iinfo(torch.int64), torch.iinfo(torch.int32)
    found = x.to(torch.int32)
    found = torch.where(x == wide.max, narrow.max, found)
    return torch.where(x == wide.min, narrow.min, found)


def close(a: torch.Tensor, b: torch.Tensor, slack: float = 0) -> bool:
    relative, absolute = TOLERANCE.get(a.dtype, (0.0, 0.0))
    wide = torch.complex128 if b.is_complex() else torch.float64
    try:
        torch.testing.assert_close(
            a.to(wide), b.to(wide), rtol=relative, atol=max(absolute, slack), equal_nan=True
        )
    except AssertionError:
        return False
    return True


def nearer(a: torch.Tensor, b: torch.Tensor, exact: torch.Tensor) -> bool:
    """Whether ours is at most twice as far from the exact result as PyTorch's."""
    wide = exact.dtype
    exact = exact.to(a.dtype).to(wide)
    away, theirs = (_distance(x.to(wide), exact) for x in (a, b))
    if math.isnan(theirs):  # overflown there
        return away <= 0.05 * float(exact[exact.isfinite()].abs().max())
    return away <= 2 * theirs


def _distance(x: torch.Tensor, exact: torch.Tensor) -> float:
    """How far apart two results are at most; infinities of one sign are not."""
    return float(torch.where(x == exact, 0, (x - exact).abs()).max())


def shown(t: torch.Tensor) -> str:
    return " ".join(str(t.ravel()[:6].tolist()).split())


# -- all of them ----------------------------------------------------------------------------------


def work(names: list[str], limit: int) -> None:
    """The verdicts of some operators, a line each, as they are found."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for op in operators():
        if full_name(op) not in names:
            continue
        for dtype in DTYPES:
            print(json.dumps({"begin": [full_name(op), str(dtype)]}), flush=True)
            if dtype not in op.supported_dtypes("cpu"):
                continue
            for form, found, text in verdicts(op, dtype, limit):
                row = {"op": full_name(op), "dtype": str(dtype), "form": form}
                print(json.dumps({**row, "verdict": found, "text": text}), flush=True)
        jax.clear_caches()


def batch(names: list[str], limit: int, seconds: float) -> list[dict[str, str]]:
    """The rows of some operators from processes of their own; what ends one is a crash of its row."""
    rows: list[dict[str, str]] = []
    waiting = list(names)
    while waiting:
        with tempfile.TemporaryFile("w+") as lines:
            command = [sys.executable, "-m", "benchmarks.torch_operators", "--worker"]
            process = subprocess.Popen(
                [*command, "--samples", str(limit), "--names", json.dumps(waiting)],
                stdout=lines,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "JAX_PLATFORMS": "cpu"},
            )
            try:
                code = process.wait(seconds * len(waiting))
            except subprocess.TimeoutExpired:
                process.kill()
                code = process.wait()
            lines.seek(0)
            found = [
                json.loads(line) for line in lines if line.startswith("{") and line.endswith("\n")
            ]
        rows += [row for row in found if "op" in row]
        if code == 0:
            break
        begun = [row["begin"] for row in found if "begin" in row]
        name, dtype = begun[-1] if begun else (waiting[0], "?")
        rows.append(
            dict(op=name, dtype=dtype, form="plain", verdict="crashed", text=f"ended: {code}")
        )
        waiting = waiting[waiting.index(name) + 1 :]
    return rows


def table(rows: list[dict[str, str]]) -> str:
    """Counts by dtype and form, as Markdown."""
    kinds = ("right", "refused", "crashed", "wrong")
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for row in rows:
        name = row["dtype"].removeprefix("torch.") + (
            "" if row["form"] == "plain" else f", {row['form']}"
        )
        counts[name][row["verdict"]] += 1
        counts["all"][row["verdict"]] += 1
    lines = ["| samples | " + " | ".join(kinds) + " | right |", "|---|" + "---:|" * 5]
    for name, found in counts.items():
        share = 100 * found["right"] / max(1, sum(found.values()))
        lines.append(
            f"| {name} | " + " | ".join(str(found[k]) for k in kinds) + f" | {share:.1f} % |"
        )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--samples", type=int, default=6, help="of each operator and dtype (0: all)"
    )
    parser.add_argument("--only", default="", help="operators whose names contain one of these")
    parser.add_argument("--every", type=int, default=1, help="one operator of each N only")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=60, help="time for an operator")
    parser.add_argument("--save", default="", help="write all rows into this file")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--names", default="", help=argparse.SUPPRESS)
    flags = parser.parse_args(arguments)
    if flags.worker:
        return work(json.loads(flags.names), flags.samples)
    parts = [part for part in flags.only.split(",") if part]
    names = [full_name(op) for op in operators()]
    names = [name for name in names if not parts or any(part in name for part in parts)]
    names = names[:: flags.every]
    size = 40  # a process takes a while to start
    batches = [names[start : start + size] for start in range(0, len(names), size)]
    rows: list[dict[str, str]] = []
    with concurrent.futures.ThreadPoolExecutor(flags.processes) as pool:
        jobs = [pool.submit(batch, some, flags.samples, flags.seconds) for some in batches]
        for job in jobs:
            rows += job.result()
            if flags.save:
                with open(flags.save, "w") as file:
                    file.writelines(json.dumps(row) + "\n" for row in rows)
    found = collections.Counter((r["verdict"], r["op"]) for r in rows if r["verdict"] != "right")
    for (kind, name), count in sorted(found.items()):
        text = next(r["text"] for r in rows if (r["verdict"], r["op"]) == (kind, name))
        print(f"{kind:8} {count:4} {name}: {text[:160]}")
    print(table(rows))


if __name__ == "__main__":
    main()
