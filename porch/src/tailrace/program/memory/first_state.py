"""The state that an optimizer begins with, made leaf by leaf.

`optimizer.init(params)` makes all of it at once, on one device. State that is to lie in shares, on
stages or in the host's memory may be larger than that device. So `init` is traced, and each leaf is
computed from what it needs alone, operation by operation as `init` would have: the same bits. Whoever
takes a leaf puts it where it will live before asking for the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from tailrace.jaxprs import internals
from tailrace.jaxprs.internals import JaxprEqn
from tailrace.jaxprs.stretches import bound, makers, run


class FirstState:
    """What `init(params)` returns, without making it.

    Attributes:
        forms: a tree of shapes.

    >>> import jax.numpy as jnp
    >>> first = FirstState(lambda p: {"a": jnp.zeros_like(p), "b": p * 2}, jnp.ones(3))
    >>> first.forms["a"].shape, [leaf.tolist() for leaf in first.leaves()]
    ((3,), [[0.0, 0.0, 0.0], [2.0, 2.0, 2.0]])
    """

    def __init__(self, init: Callable[[Any], Any], params: Any) -> None:
        given = jax.tree.leaves(params)
        closed, self.forms = jax.make_jaxpr(init, return_shape=True)(params)
        jaxpr = closed.jaxpr
        self._results = list(jaxpr.outvars)
        self._equations = jaxpr.eqns
        self._given = bound(jaxpr, closed.consts, given)
        self._makers = makers(jaxpr.eqns)

    def leaves(self) -> Iterator[Any]:
        """The leaves, each made when it is asked for."""
        for var in self._results:
            known = dict(self._given)
            run(self._needed(var), known)
            yield jnp.asarray(internals.value_of(known, var))

    def _needed(self, result: Any) -> list[JaxprEqn]:
        """The equations that a result is computed with, in order."""
        waiting, found = internals.variables([result]), set()
        while waiting:
            place = self._makers.get(waiting.pop())
            if place is not None and place not in found:
                found.add(place)
                waiting += internals.variables(self._equations[place].invars)
        return [self._equations[place] for place in sorted(found)]
