"""The initial state of an optimizer, computed leaf by leaf.

`optimizer.init(params)` computes all of it at once, on one device. State that will be sharded,
distributed over stages or offloaded may be larger than that device. So `init` is traced, and each leaf
is computed separately, operation by operation as `init` would: the same bits. The caller places each
leaf before it requests the next.
"""

# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from tailrace.base.trees import Tree
from tailrace.devices.shardings import ModelSharding
from tailrace.jaxprs import internals
from tailrace.jaxprs.internals import Atom, JaxprEqn
from tailrace.jaxprs.stretches import bound, makers, run


class FirstState:
    """The result of `init(params)`, computed on demand.

    Attributes:
        forms: a tree of shapes.

    With a `sharding`, one program makes all leaves, and each device its part of them.

    >>> import jax.numpy as jnp
    >>> first = FirstState(lambda p: {"a": jnp.zeros_like(p), "b": p * 2}, jnp.ones(3))
    >>> first.forms["a"].shape, [leaf.tolist() for leaf in first.leaves()]
    ((3,), [[0.0, 0.0, 0.0], [2.0, 2.0, 2.0]])
    """

    def __init__(
        self, init: Callable[[Any], Any], params: Tree, sharding: ModelSharding | None = None
    ) -> None:
        given = jax.tree.leaves(params)
        closed, self.forms = jax.make_jaxpr(init, return_shape=True)(params)
        jaxpr = closed.jaxpr
        self._results = list(jaxpr.outvars)
        self._equations = jaxpr.eqns
        self._given = bound(jaxpr, closed.consts, given)
        self._makers = makers(jaxpr.eqns)
        self._sharded: Callable[[], Tree] | None = None
        if sharding is not None:
            shardings = sharding.of_state(self.forms, params)
            self._sharded = lambda: _made(init, params, sharding, shardings)

    def leaves(self) -> Iterator[Any]:
        """The leaves, each computed on demand."""
        if self._sharded is not None:
            yield from jax.tree.leaves(self._sharded())
            return
        for var in self._results:
            # From the start for each leaf: what two leaves share is computed twice, and nothing is
            # kept.
            known = dict(self._given)
            # Eagerly, one operation at a time: compiled as a whole, XLA might round differently
            # from `init`.
            run(self._needed(var), known)
            yield jnp.asarray(internals.value_of(known, var))

    def _needed(self, result: Atom) -> list[JaxprEqn]:
        """The equations that compute a result, in order."""
        waiting, found = internals.variables([result]), set()
        while waiting:
            place = self._makers.get(waiting.pop())
            if place is not None and place not in found:
                found.add(place)
                waiting += internals.variables(self._equations[place].invars)
        return [self._equations[place] for place in sorted(found)]


def _made(
    init: Callable[[Any], Any], params: Tree, sharding: ModelSharding, shardings: Tree
) -> Tree:
    with sharding.within():
        return jax.jit(init, out_shardings=shardings)(params)
