"""Random JAX programs: every construct, nested, on tiny arrays of every dtype.

A program is determined by its seed, so it can be traced any number of times. `Program(seed, ...)` draws
operations one by one; each takes values made before and adds its results to them. Constructs with
programs inside (branches, loops, calls, derivatives) draw those the same way, a level deeper.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

import tailrace as tr

DTYPES = (
    "float32",
    "float32",
    "float32",
    "bfloat16",
    "float16",
    "int32",
    "uint8",
    "bool",
    "complex64",
)
SHAPES = ((), (), (1,), (3,), (3,), (2, 3), (3, 3), (0,), (0, 3), (2, 1, 3))
SCOPES = ("a", "b", "c", "a/b")


def is_key(value: Any) -> bool:
    """Whether a value is a typed random key."""
    return jnp.issubdtype(value.dtype, jax.dtypes.prng_key)


def is_float(value: Any) -> bool:
    """Whether a value is a real float."""
    return jnp.issubdtype(value.dtype, jnp.floating)


@jax.custom_jvp
def _wave(x: jax.Array) -> jax.Array:
    return jnp.sin(x)


@_wave.defjvp
def _wave_jvp(primals: Any, tangents: Any) -> Any:
    return _wave(*primals), tangents[0] * jnp.cos(primals[0]) * 0.5


@jax.custom_vjp
def _clipped(x: jax.Array) -> jax.Array:
    return jnp.clip(x, -1, 1)


_clipped.defvjp(lambda x: (_clipped(x), None), lambda _, g: (jnp.tanh(g),))

UNARY: tuple[Callable[[Any], Any], ...] = (
    jnp.sin, jnp.tanh, jax.nn.relu6, jax.nn.gelu, jax.nn.softplus, jax.nn.silu, jax.nn.logsumexp,
    lambda x: jnp.exp(-jnp.abs(x)), lambda x: jnp.tanh(x * x), lambda x: x, lambda x: -x,
    lambda x: lax.rsqrt(1 + x * x), lambda x: jax.nn.softmax(x.reshape(-1)), _wave, _clipped,
    lambda x: jnp.sort(x.reshape(-1)), lambda x: jnp.cumsum(x.reshape(-1)), lax.stop_gradient,
    lambda x: jnp.var(x), lambda x: x * 1.0, lambda x: x + 0, jnp.ones_like, lambda x: x / 3,
)  # fmt: skip
BINARY: tuple[Callable[[Any, Any], Any], ...] = (
    jnp.add, jnp.subtract, lambda a, b: jnp.tanh(a * b), jnp.maximum, jnp.arctan2,
    lambda a, b: jnp.where(a > b, a, b), lambda a, b: a * 0.3 + b * 0.7, lambda a, b: a / (1 + b * b),
)  # fmt: skip


class Program:
    """A random program; its `values` grow while it is traced.

    Args:
        seed: what decides everything.
        values: the values it starts with.
        depth: how many levels of programs may be inside.
        frozen: whether nothing may be differentiated through (the inside of a while loop).
        ours: whether it may use `tr.key()` and the like.
    """

    def __init__(
        self,
        seed: int,
        values: Sequence[Any],
        depth: int = 2,
        *,
        frozen: bool = False,
        ours: bool = False,
    ) -> None:
        self.random = random.Random(seed)
        self.values = [v if isinstance(v, jax.Array) else jnp.asarray(v) for v in values]
        self.depth, self.frozen, self.ours = depth, frozen, ours

    def run(self, count: int) -> Program:
        """Draw this many operations."""
        for _ in range(count):
            make = self.random.choice(
                SIMPLE if self.random.random() < 0.65 or not self.depth else DEEP
            )
            if self.random.random() < 0.4:
                with jax.named_scope(self.random.choice(SCOPES)):
                    made = make(self)
            else:
                made = make(self)
            self.values.extend(made if isinstance(made, list) else [made])
        return self

    # -- drawing values ---------------------------------------------------------------------------

    def any(self, accepts: Callable[[Any], bool] = lambda _: True) -> Any:
        """One of the values that are accepted, later ones more often; a constant if there are none."""
        found = [value for value in self.values if accepts(value)]
        if not found:
            return jnp.asarray(np.float32(self.random.random()))
        return found[-1] if self.random.random() < 0.3 else self.random.choice(found)

    def float(self) -> Any:
        """A float."""
        return self.any(is_float)

    def number(self) -> Any:
        """Anything but a key."""
        return self.any(lambda value: not is_key(value))

    def some(self, most: int = 3) -> list[Any]:
        """A few values."""
        return [self.any() for _ in range(self.random.randint(1, most))]

    def like(self, form: Any) -> Any:
        """A value of a given form: one that exists, a constant, or one made from another."""
        alike = [v for v in self.values if v.shape == form.shape and v.dtype == form.dtype]
        if is_key(form):
            return self.random.choice(alike)
        if alike and self.random.random() < 0.6:
            return self.random.choice(alike)
        constant = np.asarray(self.random.random() * 3).astype(form.dtype)
        if self.random.random() < 0.4:
            if form.shape == ():
                return constant  # a literal of the program
            return (
                np.full(form.shape, constant)
                if self.random.random() < 0.5
                else jnp.full(form.shape, constant)
            )
        value = jnp.real(self.number())
        value = value.reshape(-1)[:1].sum() + constant.real.astype(np.float32)
        return jnp.broadcast_to(value.astype(form.dtype), form.shape)

    def function(
        self,
        forms: Sequence[Any] = (),
        *,
        closes: bool = True,
        frozen: bool = False,
        ours: bool = True,
    ) -> Callable[..., list[Any]]:
        """A random function of some values that returns values of these forms, or a few of its own."""
        seed, count = self.random.getrandbits(32), self.random.randint(0, 2)
        outer = self.some() if closes else []
        forms = [jax.ShapeDtypeStruct(f.shape, f.dtype) for f in forms]

        def call(*operands: Any) -> list[Any]:
            inside = Program(
                seed,
                [*operands, *outer],
                self.depth - 1,
                frozen=self.frozen or frozen,
                ours=self.ours and ours,
            )
            inside.run(count)
            if forms:
                return [inside.like(form) for form in forms]
            return inside.some()

        return call


# -- single operations ------------------------------------------------------------------------------


def unary(p: Program) -> Any:
    return p.random.choice(UNARY)(p.float())


def binary(p: Program) -> Any:
    a = p.float()
    b = p.any(lambda v: is_float(v) and (v.shape in ((), a.shape) or a.shape == ()))
    return p.random.choice(BINARY)(a, b if b.shape in ((), a.shape) or a.shape == () else b.sum())


def product(p: Program) -> Any:
    a = p.any(lambda v: is_float(v) and v.shape[-1:] == (3,))
    b = p.any(lambda v: is_float(v) and v.shape == (3, 3))
    return jnp.tanh(a @ b) if a.shape[-1:] == (3,) and b.shape == (3, 3) else a


def reduction(p: Program) -> Any:
    value = p.float()
    axis = p.random.choice([None, *range(value.ndim)])
    kind = p.random.choice(
        [jnp.sum, jnp.mean, lambda x, axis: jnp.linalg.norm(x.reshape(-1)) + 0 * x.sum(axis)]
    )
    if value.size and p.random.random() < 0.3:
        kind = p.random.choice([jnp.max, jnp.var, jnp.prod])
    return kind(value, axis=axis)


def movement(p: Program) -> Any:
    value = p.number()
    at = jnp.int32(p.random.randint(-1, 3))
    return p.random.choice([
        lambda: value.reshape(-1), lambda: value.T, lambda: value[None],
        lambda: value.reshape(-1)[::-1],
        lambda: jnp.broadcast_to(value, (2, *value.shape)), lambda: value.reshape(-1)[:1],
        lambda: lax.dynamic_slice_in_dim(value.reshape(-1), at, min(2, value.size)),
        lambda: jnp.concatenate([value.reshape(-1)] * 2), lambda: jnp.pad(value, 1),
        lambda: value.reshape(-1).at[at].set(1) if value.size else value,
        lambda: jnp.take(value.reshape(-1), at, mode="clip") if value.size else value,
    ])()  # fmt: skip


def cast(p: Program) -> Any:
    value, dtype = p.number(), jnp.dtype(p.random.choice(DTYPES))
    if jnp.iscomplexobj(value) and dtype != jnp.complex64:
        value = jnp.real(value)
    if is_float(value) and not jnp.issubdtype(dtype, jnp.inexact):
        value = jnp.clip(value, 0, 9)  # what a float out of range becomes is not defined
    return value.astype(dtype)


def integers(p: Program) -> Any:
    value = p.number()
    return p.random.choice([
        lambda: jnp.real(value).reshape(-1).argmax() if value.size else jnp.int32(0),
        lambda: jnp.arange(3), lambda: jnp.real(value) > 0.5, lambda: (jnp.real(value) > 0).sum(),
        lambda: jnp.int32(3), lambda: tr.step() if p.ours else jnp.int32(1),
    ])()  # fmt: skip


def complexes(p: Program) -> Any:
    value = p.float().astype(jnp.float32)
    made = lax.complex(value, jnp.cos(value))
    return p.random.choice([made, jnp.abs(made), jnp.real(made * made.conj())])


def constant(p: Program) -> Any:
    shape, dtype = p.random.choice(SHAPES), jnp.dtype(p.random.choice(DTYPES))
    numbers = np.random.default_rng(p.random.getrandbits(32)).uniform(0, 2, shape)
    return (
        jnp.asarray(numbers.astype(dtype)) if p.random.random() < 0.7 else jnp.zeros(shape, dtype)
    )


def key(p: Program) -> Any:
    made = p.any(is_key)
    if not is_key(made) or made.shape != ():
        made = tr.key() if p.ours else jax.random.key(1)
    return p.random.choice([
        lambda: made, lambda: jax.random.fold_in(made, 3), lambda: list(jax.random.split(made)),
        lambda: jax.random.normal(made, (3,)), lambda: jax.random.bernoulli(made, 0.7, (2, 3)),
    ])()  # fmt: skip


def effect(p: Program) -> Any:
    value = p.number()
    if p.random.random() < 0.5:
        jax.debug.callback(_nothing, value)
    else:
        lax.after_all(lax.create_token(value))
    return value


def _nothing(*_: Any) -> None:
    """What a host callback calls."""


# -- constructs -------------------------------------------------------------------------------------


def branch(p: Program) -> list[Any]:
    forms, operands = p.some(2), p.some()
    number = p.random.choice([2, 2, 3])
    index = jnp.real(p.number()).astype(jnp.float32).sum()
    functions = [p.function(forms) for _ in range(number)]
    functions = [lambda *given, f=f: f(*given, *forms) for f in functions]
    if number == 2:
        return list(lax.cond(index > 0.5, *functions, *operands))
    return list(lax.switch(jnp.clip(index, -1, 9).astype(jnp.int32), functions, *operands))


def scan(p: Program) -> list[Any]:
    carry, length = p.some(2), p.random.choice([0, 1, 2, 3])
    rows = None
    if p.random.random() < 0.6:
        row = p.any()
        rows = jnp.broadcast_to(row, (length, *row.shape))
    forms = [*carry, *p.some(2)] if p.random.random() < 0.7 else carry
    body = p.function(forms)

    def one_pass(carry: Any, x: Any) -> Any:
        made = body(*carry, *([] if x is None else [x]), *forms[len(carry) :])
        return made[: len(carry)], made[len(carry) :]

    reverse, unroll = p.random.random() < 0.3, p.random.choice([1, 1, 2])
    carry, ys = lax.scan(one_pass, carry, rows, length, reverse=reverse, unroll=unroll)
    return [*carry, *ys]


def fori(p: Program) -> list[Any]:
    carry = p.some(2)
    body = p.function(carry)
    return list(lax.fori_loop(0, p.random.choice([1, 2]), lambda i, c: body(*c, i), carry))


def while_loop(p: Program) -> list[Any]:
    carry = [lax.stop_gradient(p.number()) for _ in range(2)]
    most = jnp.clip(jnp.real(carry[0]).astype(jnp.float32).sum(), 0, 2).astype(jnp.int32)
    body = p.function(carry, closes=False, frozen=True)
    ran = lax.while_loop(
        lambda c: c[0] < most, lambda c: (c[0] + 1, body(*c[1], c[0])), (jnp.int32(0), carry)
    )
    return [ran[0], *ran[1]]


def jit(p: Program) -> list[Any]:
    return list(jax.jit(p.function())(*p.some()))


def remat(p: Program) -> list[Any]:
    policies = jax.checkpoint_policies
    policy = p.random.choice([None, policies.dots_saveable, policies.everything_saveable])
    return list(jax.checkpoint(p.function(), policy=policy)(*p.some()))


def vmap(p: Program) -> list[Any]:
    value = p.any(lambda v: v.ndim and v.shape[0] and not is_key(v))
    if not value.ndim:
        value = value[None]
    return list(jax.vmap(p.function(closes=p.random.random() < 0.5))(value))


def custom_jvp(p: Program) -> Any:
    x, inside = p.float(), p.function([p.float()], closes=False)
    function = jax.custom_jvp(lambda x: inside(x)[0])

    def rule(primals: Any, tangents: Any) -> Any:
        out = function(*primals)
        return out, jnp.broadcast_to(tangents[0].sum(), out.shape).astype(out.dtype)

    function.defjvp(rule)
    return function(x)


def custom_vjp(p: Program) -> Any:
    x, inside = p.float(), p.function([p.float()], closes=False)
    function = jax.custom_vjp(lambda x: inside(x)[0])
    back = lambda x, g: ((jnp.cos(x) * g.sum().astype(x.dtype)).astype(x.dtype),)  # noqa: E731
    function.defvjp(lambda x: (function(x), x), back)
    return function(x)


def gradient(p: Program) -> Any:
    x, inside = p.float(), p.function(closes=False)
    if p.frozen:
        return x

    def total(x: Any) -> Any:
        floats = [v for v in inside(x) if is_float(v)]
        return functools.reduce(
            jnp.add,
            [jnp.tanh(v.astype(jnp.float32)).sum() for v in floats],
            x.astype(jnp.float32).sum(),
        )

    return jax.grad(total)(x)


def shard_map(p: Program) -> list[Any]:
    operands, inside = [p.number()], p.function(closes=False, ours=False)
    mesh, spec = Mesh(np.asarray(jax.devices()[:1]), ("i",)), PartitionSpec()
    call = lambda *given: [lax.psum(v, "i") if is_float(v) else v for v in inside(*given)]  # noqa: E731
    return list(
        jax.shard_map(call, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)(*operands)
    )


SIMPLE = (unary, unary, unary, binary, binary, binary, product, product, reduction, reduction, movement,
          movement, cast, cast, integers, complexes, constant, key, effect)  # fmt: skip
DEEP = (branch, branch, branch, scan, scan, scan, fori, while_loop, jit, jit, remat, vmap, custom_jvp,
        custom_vjp, gradient, shard_map)  # fmt: skip
