"""Each kind of convolution: in a program's entry, in a scan, and in the scan as Tailrace emits it.

    python -m benchmarks.convolutions --only 2d --dtypes float32,bfloat16

Milliseconds of one convolution on CPU, the fastest of interleaved rounds: short runs on a shared
machine have medians that say more about the neighbours. The last columns name the form
(`tailrace.jaxprs.convolutions`) and compare its result with that of the entry.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks import report
from benchmarks.report import Contender
from tailrace.jaxprs import convolutions

PASSES = 3
"""Convolutions in one timed run, each of other values."""

BASES: dict[int, dict[str, Any]] = {
    1: {"batch": 32, "size": 64},
    2: {"batch": 8, "size": 20},
    3: {"batch": 2, "size": 10},
}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "features first": {"last": False},
    "first layer": {"inside": 1},
    "rgb": {"inside": 3},
    "1x1": {"kernel": 1},
    "1x1 strided": {"kernel": 1, "stride": 2},
    "strided": {"stride": 2},
    "dilated": {"dilation": 2},
    "transposed": {"spread": 2},
    "grouped": {"groups": 4, "inside": 8, "outside": 8},
    "depthwise": {"groups": 32, "inside": 1, "outside": 1},
    "depthwise strided": {"groups": 32, "inside": 1, "outside": 1, "stride": 2},
    "depthwise x2": {"groups": 32, "inside": 1, "outside": 2},
}


def main(arguments: list[str] | None = None) -> None:
    parser = report.common_flags(__doc__, steps=PASSES, repeats=7)
    parser.add_argument("--dtypes", default="float32", help="comma-separated (%(default)s)")
    given = parser.parse_args(arguments)
    rows = []
    for dtype in given.dtypes.split(","):
        for name, gradient, eqn in cases(dtype, given.only):
            rows.append(measured(f"{dtype} {name}, {gradient}", eqn, given.repeats))
            print(*rows[-1], flush=True)
    headings = ("", "entry ms", "scan ms", "rewritten ms", "of entry", "of scan", "form", "result")
    chosen = [f"--{key} {value}" for key, value in vars(given).items() if key == "only" and value]
    command = " ".join(["python -m benchmarks.convolutions", f"--dtypes {given.dtypes}", *chosen])
    parts = [report.markdown_table(headings, rows)]
    path = None if given.no_record else report.RESULTS
    report.publish("Convolutions in loops on CPU, kind by kind", command, parts, path=path)


def cases(dtype: str, only: str) -> Iterator[tuple[str, str, Any]]:
    """(name, which gradient, equation) of every kind."""
    for dims, base in BASES.items():
        for name, kind in KINDS.items():
            if only in f"{dims}d {name}":
                for gradient, eqn in equations(dims, dtype=dtype, **base, **kind):
                    yield f"{dims}d {name}", gradient, eqn


def equations(
    dims: int,
    *,
    dtype: str,
    batch: int,
    size: int,
    kernel: int = 3,
    groups: int = 1,
    inside: int = 32,
    outside: int = 32,
    stride: int = 1,
    dilation: int = 1,
    spread: int = 1,
    last: bool = True,
) -> Iterator[tuple[str, Any]]:
    """A convolution and its two gradients, as JAX writes them."""
    space, extents, kernels = "012"[:dims], (size,) * dims, (kernel,) * dims
    if last:
        specs = (f"N{space}C", f"{space}IO", f"N{space}C")
        shapes = (batch, *extents, groups * inside), (*kernels, inside, groups * outside)
    else:
        specs = (f"NC{space}", f"OI{space}", f"NC{space}")
        shapes = (batch, groups * inside, *extents), (groups * outside, inside, *kernels)
    x, w = (jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)
    padding: Any = "SAME" if spread == 1 else [(kernel - 1, kernel - 1)] * dims

    def function(x: Any, w: Any) -> Any:
        spreads, dilations = (spread,) * dims, (dilation,) * dims
        return lax.conv_general_dilated(
            x, w, (stride,) * dims, padding, spreads, dilations, specs, groups
        )

    out = jax.eval_shape(function, x, w)
    to_input = lambda w, g: jax.linear_transpose(lambda x: function(x, w), x)(g)  # noqa: E731
    to_weights = lambda x, g: jax.linear_transpose(lambda w: function(x, w), w)(g)  # noqa: E731
    for name, program in [
        ("forward", jax.make_jaxpr(function)(x, w)),
        ("input gradient", jax.make_jaxpr(to_input)(w, out)),
        ("weight gradient", jax.make_jaxpr(to_weights)(x, out)),
    ]:
        (eqn,) = [e for e in program.jaxpr.eqns if e.primitive.name == "conv_general_dilated"]
        yield name, eqn


def measured(name: str, eqn: Any, repeats: int) -> tuple[str, ...]:
    """One row of the table."""
    rng = np.random.default_rng(0)
    a, b = (var.aval for var in eqn.invars)
    lhs = jnp.asarray(rng.normal(size=(PASSES, *a.shape)), a.dtype)
    rhs = jnp.asarray(rng.normal(size=b.shape), b.dtype)
    plain = lambda a, b: eqn.primitive.bind(a, b, **eqn.params)  # noqa: E731
    fast = lambda a, b: convolutions.bind_again(eqn, [a, b])[0]  # noqa: E731
    entry, scan, ours = jax.jit(plain), scanned(plain), scanned(fast)
    expected, found = (
        np.asarray(out, np.float32) for out in (entry(lhs[0], rhs), ours(lhs, rhs)[0])
    )
    far = np.abs(found - expected).max() / np.abs(expected).max()
    scan(lhs, rhs)
    firsts = [lhs[i] for i in range(PASSES)]
    contenders = [
        Contender("entry", lambda: [entry(x, rhs).block_until_ready() for x in firsts]),
        Contender("scan", lambda: scan(lhs, rhs).block_until_ready()),
        Contender("rewritten", lambda: ours(lhs, rhs).block_until_ready()),
    ]
    report.measure(contenders, repeats, say=False)
    fastest = [min(c.seconds) for c in contenders]
    form = convolutions.Kind.of(eqn).fastest()
    return (
        name,
        *(f"{seconds / PASSES * 1e3:.2f}" for seconds in fastest),
        f"{fastest[2] / fastest[0]:.2f}",
        f"{fastest[2] / fastest[1]:.2f}",
        "as it is" if form is None else form.__name__,
        "bit-equal" if far == 0 else f"{far:.0e}",
    )


def scanned(function: Any) -> Any:
    """The function in the body of a scan over left operands."""
    return jax.jit(lambda lhs, rhs: lax.scan(lambda c, a: (c, function(a, rhs)), 0, lhs)[1])


if __name__ == "__main__":
    main()
