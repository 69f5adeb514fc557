"""Random small programs: every tap equals a plain evaluation of the same expression."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tailrace as tr
from oracles import assert_close

SHAPE = (3,)
UNARY = {"sin": (jnp.sin, np.sin), "tanh": (jnp.tanh, np.tanh), "neg": (jnp.negative, np.negative)}
BINARY = {"add": np.add, "mul": np.multiply, "sub": np.subtract}
ON_DEVICE = {"add": jnp.add, "mul": jnp.multiply, "sub": jnp.subtract}


@dataclasses.dataclass(frozen=True)
class Node:
    """An expression over two arrays. `kind` says what it is; `mark` numbers its scope, if any."""

    kind: str
    parts: tuple[Node, ...] = ()
    mark: int = -1


class Plain:
    """Evaluates an expression with numpy, and notes what each numbered scope yields, pass by pass.

    Inside a scan a value has a leading dim in the end; a branch that is not taken yields nothing.
    """

    def __init__(self) -> None:
        self.values: dict[int, object] = {}

    def run(self, node: Node, w: np.ndarray, x: np.ndarray) -> np.ndarray:
        value = self._value(node, w, x)
        if node.mark >= 0:
            self.values[node.mark] = value
        return value

    def _value(self, node: Node, w: np.ndarray, x: np.ndarray) -> np.ndarray:
        kind = node.kind
        if kind in ("w", "x"):
            return w * np.float32(1.5) if kind == "w" else x * np.float32(0.5)
        if kind in UNARY:
            return UNARY[kind][1](self.run(node.parts[0], w, x))
        if kind in BINARY:
            return BINARY[kind](*(self.run(part, w, x) for part in node.parts))
        if kind == "scan":
            passes = []
            for _ in range(2):
                inner = Plain()
                x = inner.run(node.parts[0], w, x)
                passes.append(inner.values)
            for mark in passes[0]:
                if all(mark in values for values in passes):
                    self.values[mark] = np.stack([values[mark] for values in passes])
                else:
                    self.values[mark] = None  # a branch, taken in some passes only
            for mark in set(passes[1]) - set(passes[0]):
                self.values[mark] = None
            return x
        if kind == "cond":
            return self.run(node.parts[0 if x.sum() > 0 else 1], w, x)
        return self.run(node.parts[0], w, x)  # jit, remat, vmap: only wrappings


def traced(node: Node, w, x):
    """The same as a JAX function, with scopes."""
    if node.mark >= 0:
        with jax.named_scope(f"n{node.mark}"):
            return _traced(node, w, x)
    return _traced(node, w, x)


def _traced(node: Node, w, x):
    kind, parts = node.kind, node.parts
    if kind in ("w", "x"):
        return w * 1.5 if kind == "w" else x * 0.5
    if kind in UNARY:
        return UNARY[kind][0](traced(parts[0], w, x))
    if kind in ON_DEVICE:
        return ON_DEVICE[kind](traced(parts[0], w, x), traced(parts[1], w, x))
    if kind == "scan":
        return jax.lax.scan(lambda c, _: (traced(parts[0], w, c), None), x, None, length=2)[0]
    if kind == "cond":
        branches = [lambda w, x, p=part: traced(p, w, x) for part in parts]
        return jax.lax.cond(x.sum() > 0, *branches, w, x)
    inner = lambda w, x: traced(parts[0], w, x)  # noqa: E731
    if kind == "jit":
        return jax.jit(inner)(w, x)
    if kind == "remat":
        return jax.checkpoint(inner)(w, x)
    return jax.vmap(inner, (0, 0))(w[None], x[None])[0]


def numbered(node: Node, count: list[int]) -> Node:
    """Give every operation a scope of its own, numbered as in the program."""
    mark = count[0]
    count[0] += 1
    return Node(node.kind, tuple(numbered(part, count) for part in node.parts), mark)


leaves = st.sampled_from([Node("w"), Node("x")])
expressions = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.builds(lambda k, a: Node(k, (a,)), st.sampled_from(sorted(UNARY)), inner),
        st.builds(lambda k, a, b: Node(k, (a, b)), st.sampled_from(sorted(BINARY)), inner, inner),
        st.builds(lambda a: Node("scan", (a,)), inner),
        st.builds(lambda a, b: Node("cond", (a, b)), inner, inner),
        st.builds(lambda k, a: Node(k, (a,)), st.sampled_from(["jit", "remat"]), inner),
    ),
    max_leaves=5,
)
SLOW = settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


def arrays(seed):
    rng = np.random.default_rng(seed)
    return rng.normal(size=SHAPE).astype(np.float32), rng.normal(size=SHAPE).astype(np.float32)


def scope_of(records, mark):
    """The record of what leaves a scope: scopes are nested, so its name ends with its own part."""
    names = [n for n in records.names if n.startswith("activation/") and ":" not in n]
    return [records[n] for n in names if n.split("/")[-1] == f"n{mark}"]


def check(records, values):
    found = 0
    for mark, expected in values.items():
        here = scope_of(records, mark)
        if expected is None or not here:
            continue  # partly taken branches; scopes whose value leaves under an inner scope's name
        found += 1
        value = here[0].values[0]
        if value.ndim < expected.ndim:
            # Differentiation moves out of a scan what is the same in each of its passes.
            value = np.broadcast_to(value, expected.shape)
        assert_close(value, expected)
    return found


@SLOW
@given(expressions, st.integers(0, 1000))
def test_every_scope_of_an_observed_function(node, seed):
    node = numbered(node, [0])
    w, x = arrays(seed)
    out, records = tr.observe(
        lambda w, x: traced(node, w, x).sum(), [tr.Tap("*", reduce="tensor")]
    )(w, x)
    plain = Plain()
    expected = plain.run(node, w, x)
    assert_close(np.asarray(out), np.asarray(expected.sum()))
    assert check(records, plain.values) >= 1


@SLOW
@given(expressions, st.integers(0, 1000))
def test_every_scope_of_a_training_step_and_its_gradient(node, seed):
    node = numbered(node, [0])
    w, x = arrays(seed)

    def loss(w, x):
        return (traced(node, w, x) ** 2).sum()

    def plain_loss(w, x):
        return (traced(dataclasses.replace(node, mark=-1), w, x) ** 2).sum()

    trainer = tr.Trainer(loss, optax.sgd(0.1), w, observe=[tr.Tap("*", reduce="tensor")])
    trainer.fit([(x,)], steps=1)
    records = trainer.records
    plain = Plain()
    out = plain.run(node, w, x)
    assert check(records, plain.values) >= 1
    assert_close(records["grad/params"].values[0], np.asarray(jax.grad(plain_loss)(w, x)))
    (top,) = [n for n in records.names if n in ("cotangent/n0",)] or [None]
    if top:  # the gradient of the sum of squares in what the whole expression yields
        assert_close(records[top].values[0], 2 * out)
