"""Convolutions inside loops, in a form that XLA's CPU compiler turns into fast code.

For convolutions in a program's entry computation, that compiler transposes operands into the one layout
its library accepts (batch, space, features; kernels space, in, out). It does not do so in the body of a
loop: any other layout, and every gradient has another one, runs as a naive loop over scalars, 10 to 80
times slower. So this module emits them in the library's layout, with explicit transposes. The library
itself is slow for small groups and in three dimensions, in entry computations too; other forms are
faster there.

`python -m benchmarks.convolutions` measures each kind. Milliseconds on 2 cores, float32, as XLA runs it
in the entry / in a scan / in the scan in the form chosen here:

    2 dims, 3x3, 32 channels, 28x28, batch 32: input gradient      12.6 /  543 / 15.7   library
    the same, weight gradient                                      24.0 / 1515 / 22.7   library
    1x1, weight gradient                                           15.1 /  560 /  6.1   matmuls
    4 groups, weight gradient                                      1530 /  445 / 24.3   library
    transposed, 20x20, batch 8, weight gradient                    19.0 / 49.4 / 12.3   matmuls
    depthwise, forward                                             65.0 / 56.1 /  3.6   products
    depthwise, 20x20, batch 8, weight gradient                      1.0 / 41.7 /  1.4   products
    3 dims, 3x3x3, 32 channels, 10x10x10, batch 2: forward         13.6 / 16.8 /  5.4   matmuls
    the same, strided, input gradient                              82.0 / 18.0 /  7.6   matmuls
    features first, 512 channels, 4x4, batch 16, weight gradient   40.0 / 1279 / 27.8   swapped

The library's form is bit-equal to one jit call per step, which runs the same kernel, and so is the
swapped one in all measurements; the other forms, and weight gradients of grouped convolutions, sum in
another order.
"""

# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tailrace.jaxprs import internals
from tailrace.jaxprs.internals import ClosedJaxpr, Jaxpr, JaxprEqn, primitives

MOST_TERMS = 64
"""A sum over positions is unrolled up to this many terms; 7x7 and 3x3x3 kernels fit."""

THIN = 4
"""Up to this many weights per group, elementwise products replace matrix products."""

LARGE = 1 << 19
"""From this many elements, in more bytes than a core's cache has, a transposed result takes long."""

_DTYPES = ("float32", "bfloat16", "float16")  # the library's; other dtypes are left alone
_CALLS = {
    *("jit", "pjit", "checkpoint", "remat2", "closed_call", "scan", "while", "cond"),
    *("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"),
}


def bind_again(eqn: JaxprEqn, inputs: list[Any]) -> list[Any]:
    """`internals.bind_again`, with every convolution in the form that is fastest on a CPU."""
    form = fast_form(eqn)
    if form is not None:
        return [form(*inputs)]
    return internals.bind_again(_with_fast_forms(eqn), inputs)


def fast_form(eqn: JaxprEqn) -> Callable[[Any, Any], Any] | None:
    """A faster function of a convolution's operands; None if it is best emitted unchanged."""
    if eqn.primitive is not primitives.conv_general_dilated_p:
        return None
    kind = Kind.of(eqn)
    form = kind.fastest()
    return None if form is None else lambda lhs, rhs: form(kind, lhs, rhs)


# -- programs inside equations --------------------------------------------------------------------


def _with_fast_forms(eqn: JaxprEqn) -> JaxprEqn:
    """The equation, with every convolution in the programs inside it replaced by one equation."""
    if eqn.primitive.name not in _CALLS:
        return eqn
    changed = {
        key: new for key, value in eqn.params.items() if (new := _replaced(value)) is not value
    }
    return eqn.replace(params={**eqn.params, **changed}) if changed else eqn


def _replaced(value: Any) -> Any:
    """A parameter of an equation; the same object if there is nothing to replace."""
    if isinstance(value, tuple | list):
        items = [_replaced(item) for item in value]
        same = all(new is old for new, old in zip(items, value, strict=True))
        # A named tuple (dimension numbers) is never made of programs, and has another constructor.
        return value if same or hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, ClosedJaxpr):
        inner = _replaced_in(value.jaxpr)
        return value if inner is value.jaxpr else ClosedJaxpr(inner, value.consts)
    return _replaced_in(value) if isinstance(value, Jaxpr) else value


def _replaced_in(jaxpr: Jaxpr) -> Jaxpr:
    equations = [_called(eqn) or _with_fast_forms(eqn) for eqn in jaxpr.eqns]
    same = all(new is old for new, old in zip(equations, jaxpr.eqns, strict=True))
    return jaxpr if same else jaxpr.replace(eqns=equations)


def _called(eqn: JaxprEqn) -> JaxprEqn | None:
    """One equation that calls the fast form of a convolution; None if there is no faster form."""
    form = fast_form(eqn)
    if form is None:
        return None

    def convolution(lhs: jax.Array, rhs: jax.Array) -> Any:
        return form(lhs, rhs)

    # One equation for one: a jit call keeps the length of the program, and so every position in it.
    (call,) = jax.make_jaxpr(jax.jit(convolution))(*map(internals.form_of, eqn.invars)).jaxpr.eqns
    return call.replace(invars=eqn.invars, outvars=eqn.outvars, source_info=eqn.source_info)


# -- the kinds ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Kind:
    """A convolution, independent of the layout of its operands.

    Attributes:
        params: the equation's parameters.
        dtype: the dtype of the result.
        operand_dtypes: the names of the operands' dtypes.
        lhs: the shape of the left operand as (batch, *space, features).
        rhs: the shape of the kernel as (*space, in, out).
        space: the spatial shape of the result.
    """

    params: dict[str, Any]
    dtype: Any
    operand_dtypes: tuple[str, ...]
    lhs: tuple[int, ...]
    rhs: tuple[int, ...]
    space: tuple[int, ...]

    @classmethod
    def of(cls, eqn: JaxprEqn) -> Kind:
        """The kind of a convolution's equation."""
        left, kernel, out = eqn.params["dimension_numbers"]
        a, b, made = map(internals.form_of, [*eqn.invars, *eqn.outvars])
        return cls(
            eqn.params,
            made.dtype,
            (str(a.dtype), str(b.dtype)),
            tuple(a.shape[i] for i in _last(left)),
            tuple(b.shape[i] for i in (*kernel[2:], kernel[1], kernel[0])),
            tuple(made.shape[i] for i in out[2:]),
        )

    @property
    def groups(self) -> int:
        """The number of independent convolutions it consists of."""
        return self.params["feature_group_count"] * self.params["batch_group_count"]

    def fastest(self) -> Callable[[Kind, Any, Any], Any] | None:
        """The form that measured fastest for this kind; None to leave it unchanged."""
        left, right = self.operand_dtypes
        # Empty operands are left alone: there is nothing to gain.
        if left not in _DTYPES or left != right or 0 in (*self.lhs, *self.rhs, *self.space):
            return None
        if len(self.space) not in (1, 2, 3):
            return None
        *kernel, inner, outer = self.rhs
        positions, results = math.prod(kernel), math.prod(self.space)
        if self.params["batch_group_count"] > 1:
            rows = self.lhs[0] // self.groups
            if rows * outer // self.groups <= THIN and results <= MOST_TERMS:
                return products_by_output
        elif self.groups > 1:
            if inner * outer // self.groups <= THIN and positions <= MOST_TERMS:
                # In another layout XLA does not call its library, and is as fast if it sums over
                # inputs.
                return products_by_kernel if inner == 1 or self._in_order() else None
        elif results <= min(positions, MOST_TERMS) and self._slow_in_library():
            return matmuls_by_output
        elif len(self.space) == 3 and positions <= MOST_TERMS:
            return matmuls_by_kernel
        elif self._transposes_much():
            return swapped
        return None if self._in_order() and not self.crops_and_pads else library

    @property
    def crops_and_pads(self) -> bool:
        """Whether a dim is cropped on one side and padded on the other.

        JAX 0.10 computes that wrong on a CPU (docs/upstream/xla_cpu_negative_padding.md). The gradient
        of the input has it where the padding of one side alone is as long as the kernel.
        """
        return any(min(sides) < 0 < max(sides) for sides in self.params["padding"])

    def _slow_in_library(self) -> bool:
        """Whether the library is slow at it: a large kernel and a small result (weight gradients)."""
        alone, spread = math.prod(self.space) == 1, max(self.params["lhs_dilation"]) > 1
        return math.prod(self.rhs[:-2]) > 1 and (alone or spread or len(self.space) == 3)

    def _transposes_much(self) -> bool:
        """Whether the library's result is large and has its first dimension last (weight gradients)."""
        rows, columns, *_ = self.params["dimension_numbers"][2]
        changes = ("window_strides", "lhs_dilation", "rhs_dilation")
        plain = all(step == 1 for name in changes for step in self.params[name])
        # The swapped form sums over the space of the left operand instead of that of the kernel.
        no_more = math.prod(self.lhs[1:-1]) <= math.prod(self.rhs[:-2])
        # JAX 0.10 computes some of these wrong; see `crops_and_pads`.
        padded = all(side >= 0 for sides in self.swapped_padding() for side in sides)
        size = self.lhs[0] * math.prod(self.space) * self.rhs[-1]
        return columns < rows and plain and no_more and padded and size >= LARGE

    def swapped_padding(self) -> list[tuple[int, int]]:
        """The padding of the kernel, if kernel and left operand change places."""
        sizes = zip(self.space, self.lhs[1:-1], self.rhs[:-2], self.params["padding"], strict=True)
        return [(n - 1 - low, size - over + low) for n, size, over, (low, _) in sizes]

    def _in_order(self) -> bool:
        """Whether the library accepts its layout unchanged."""
        left, kernel, out = self.params["dimension_numbers"]
        orders = (_last(left), (*kernel[2:], kernel[1], kernel[0]), _last(out))
        same = all(order == tuple(range(len(self.lhs))) for order in orders)
        return same and self.params["batch_group_count"] == 1


def _last(spec: Sequence[int]) -> tuple[int, ...]:
    """From (batch, features, *space) to (batch, *space, features)."""
    return (spec[0], *spec[2:], spec[1])


def _ordered(kind: Kind, lhs: jax.Array, rhs: jax.Array) -> tuple[Any, Any]:
    """The operands with features last; batch groups become feature groups."""
    left, kernel, _ = kind.params["dimension_numbers"]
    lhs = lhs.transpose(_last(left))
    rhs = rhs.transpose(*kernel[2:], kernel[1], kernel[0])
    groups = kind.params["batch_group_count"]
    if groups > 1:
        # A batch group uses its part of the batch and its part of the outputs. With the parts as
        # groups of features, it is a grouped convolution, which the library has.
        apart = lhs.reshape(groups, -1, *lhs.shape[1:])
        lhs = jnp.moveaxis(apart, 0, -2).reshape(*apart.shape[1:-1], -1)
    return lhs, rhs


def _restored(kind: Kind, out: jax.Array) -> Any:
    """The result in the layout of the equation."""
    now = _last(kind.params["dimension_numbers"][2])
    return out.astype(kind.dtype).transpose([now.index(dim) for dim in range(len(now))])


def _padded(kind: Kind, lhs: jax.Array) -> Any:
    sides = zip(kind.params["padding"], kind.params["lhs_dilation"], strict=True)
    config = [(low, high, dilation - 1) for (low, high), dilation in sides]
    return lax.pad(lhs, jnp.zeros((), lhs.dtype), [(0, 0, 0), *config, (0, 0, 0)])


def _windows(
    lhs: jax.Array,
    places: Sequence[int],
    steps: Sequence[int],
    sizes: Sequence[int],
    strides: Sequence[int],
) -> Any:
    """For each position in space, that position and the strided slice that starts there."""
    for place in itertools.product(*map(range, places)):
        starts = [at * step for at, step in zip(place, steps, strict=True)]
        ends = [a + (n - 1) * s + 1 for a, n, s in zip(starts, sizes, strides, strict=True)]
        limits = (lhs.shape[0], *ends, lhs.shape[-1])
        yield place, lax.slice(lhs, (0, *starts, 0), limits, (1, *strides, 1))


def _by_library(
    kind: Kind,
    lhs: jax.Array,
    rhs: jax.Array,
    padding: str | Sequence[tuple[int, int]],
    spread: Sequence[int] | None = None,
) -> Any:
    """The convolution of operands that are in the library's layout, with this padding and dilation."""
    params, space = kind.params, "012"[: len(kind.space)]
    return lax.conv_general_dilated(
        lhs,
        rhs,
        params["window_strides"],
        padding,
        spread,
        params["rhs_dilation"],
        (f"N{space}C", f"{space}IO", f"N{space}C"),
        kind.groups,
        precision=params["precision"],
        preferred_element_type=params["preferred_element_type"],
    )


# -- the forms ------------------------------------------------------------------------------------


def library(kind: Kind, lhs: jax.Array, rhs: jax.Array) -> Any:
    """The layout that the library accepts, with explicit transposes."""
    params = kind.params
    lhs, rhs = _ordered(kind, lhs, rhs)
    if kind.crops_and_pads:
        return _restored(kind, _by_library(kind, _padded(kind, lhs), rhs, "VALID"))
    out = _by_library(kind, lhs, rhs, params["padding"], params["lhs_dilation"])
    return _restored(kind, out)


def swapped(kind: Kind, lhs: jax.Array, rhs: jax.Array) -> Any:
    """The library's form with the operands in each other's place, which transposes the result.

    The library makes the gradient of weights (out, in, *space) as (in, *space, out), where XLA reads
    each element from another row. Swapped it is (out, *space, in), reversed in space, and the elements
    of a row stay in it.
    """
    params = kind.params
    left, kernel, (rows, columns, *places) = params["dimension_numbers"]
    image = rhs.transpose(kernel[0], *kernel[2:], kernel[1])
    weights = lhs.transpose(*left[2:], left[1], left[0])
    out = _by_library(kind, image, weights, kind.swapped_padding())
    now = (columns, *places, rows)
    out = lax.rev(out, tuple(range(1, out.ndim - 1))).astype(kind.dtype)
    return out.transpose([now.index(dim) for dim in range(out.ndim)])


def matmuls_by_kernel(kind: Kind, lhs: jax.Array, rhs: jax.Array) -> Any:
    """Sum over the kernel's positions: shifted input times one matrix each."""
    params, total = kind.params, jnp.float32(0)
    lhs, rhs = _ordered(kind, lhs, rhs)
    over = (params["rhs_dilation"], kind.space, params["window_strides"])
    for place, part in _windows(_padded(kind, lhs), kind.rhs[:-2], *over):
        total = total + _dot(kind, part, rhs[place], (part.ndim - 1,), (0,))
    return _restored(kind, total)


def matmuls_by_output(kind: Kind, lhs: jax.Array, rhs: jax.Array) -> Any:
    """One matrix product over the whole kernel for each position of the (small) result."""
    params = kind.params
    lhs, rhs = _ordered(kind, lhs, rhs)
    over = (params["window_strides"], kind.rhs[:-2], params["rhs_dilation"])
    inside = tuple(range(rhs.ndim - 1))
    made = [
        _dot(kind, part, rhs, tuple(dim + 1 for dim in inside), inside)
        for _, part in _windows(_padded(kind, lhs), kind.space, *over)
    ]
    out = jnp.stack(made, 1)
    return _restored(kind, out.reshape(out.shape[0], *kind.space, out.shape[-1]))


def _dot(
    kind: Kind, a: jax.Array, b: jax.Array, over_a: Sequence[int], over_b: Sequence[int]
) -> Any:
    return lax.dot_general(
        a,
        b,
        ((over_a, over_b), ((), ())),
        precision=kind.params["precision"],
        # Terms are added up in float32 and rounded once, at the end.
        preferred_element_type=jnp.float32,
    )


def products_by_kernel(kind: Kind, lhs: jax.Array, rhs: jax.Array) -> Any:
    """Sum over the kernel's positions: shifted input times weights, elementwise, for small groups."""
    params, total = kind.params, jnp.float32(0)
    lhs, rhs = _ordered(kind, lhs, rhs)
    *_, inner, outer = rhs.shape
    over = (params["rhs_dilation"], kind.space, params["window_strides"])
    for place, part in _windows(_padded(kind, lhs), kind.rhs[:-2], *over):
        values = part.reshape(*part.shape[:-1], kind.groups, inner).astype(jnp.float32)
        weights = rhs[place].reshape(inner, kind.groups, -1).astype(jnp.float32)
        for row in range(inner):
            total = total + values[..., row, None] * weights[row]
    return _restored(kind, total.reshape(*total.shape[:-2], outer))


def products_by_output(kind: Kind, lhs: jax.Array, rhs: jax.Array) -> Any:
    """Weight gradient of small groups: for each position of the result, one reduction per weight."""
    params = kind.params
    left, kernel, _ = params["dimension_numbers"]
    lhs = lhs.transpose(left[1], *left[2:], left[0])  # what is summed over first, groups last
    rhs = rhs.transpose(kernel[1], *kernel[2:], kernel[0])
    over = (params["window_strides"], kind.rhs[:-2], params["rhs_dilation"])
    values = rhs.reshape(*rhs.shape[:-1], kind.groups, -1).astype(jnp.float32)
    made = []
    for _, part in _windows(_padded(kind, lhs), kind.space, *over):
        rows = part.reshape(*part.shape[:-1], kind.groups, -1).astype(jnp.float32)
        sums = [
            (rows[..., row] * values[..., column]).sum(tuple(range(rhs.ndim - 1)))
            for row in range(rows.shape[-1])
            for column in range(values.shape[-1])
        ]
        made.append(jnp.stack(sums, -1).reshape(kind.groups, rows.shape[-1], -1))
    out = jnp.moveaxis(jnp.stack(made), 2, 0)  # rows, positions, groups, columns
    return _restored(kind, out.reshape(out.shape[0], *kind.space, kind.rhs[-1]))
