"""Which operation made the first NaN or Inf: a step is run once more, one operation at a time.

Slow, and only run after a guard has stopped the training. Loops are unrolled, so that the pass in
which it happened is known; everything is computed eagerly, so that operands can be looked at.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from tailrace.jaxprs import internals
from tailrace.jaxprs.internals import JaxprEqn, primitives
from tailrace.jaxprs.marks import ambient_p, dequeue_p, mark_p, queue_of
from tailrace.jaxprs.walk import Position
from tailrace.program.tracing.tap_selection import full_name
from tailrace.taps.frame import Block, Frame
from tailrace.taps.rewrite import Rewriter

INFEED = "infeed"
"""The operation of a culprit that no operation made: the data were bad."""


@dataclasses.dataclass(frozen=True)
class Culprit:
    """Where the first bad value was made.

    Attributes:
        operation: the name of the operation.
        scope: the named scopes it stands in.
        source: `file:line` of the user's code.
        microbatch: in which microbatch of the step.
        low: the smallest of its operands' finite values.
        high: the largest of them.
        row: the first index along the leading dim at which the result is bad; -1 for a scalar.
        made: what it made: "NaN" or "Inf".
        backward: whether it belongs to the backward pass.
    """

    operation: str
    scope: str
    source: str
    microbatch: int
    low: float
    high: float
    row: int
    made: str
    backward: bool

    def __str__(self) -> str:
        where = f" in {self.scope!r}" if self.scope else ""
        line = f" at {self.source}" if self.source else ""
        way = " of the backward pass" if self.backward else ""
        row = f", first in row {self.row}" if self.row >= 0 else ""
        if self.operation == INFEED:
            return f"The element from the dataset itself holds the first {self.made}{row}"
        return (
            f"The operation {self.operation!r}{way}{where}{line} made the first {self.made}{row}; "
            f"its operands ranged from {self.low:.6g} to {self.high:.6g}"
        )


class Finder(Rewriter):
    """Runs a program eagerly and remembers the first operation that made a bad value of good ones."""

    def __init__(self) -> None:
        super().__init__()
        self.culprit: Culprit | None = None
        self.bad: list[str] = []
        self._around: list[JaxprEqn] = []
        """The equations that the one at hand stands in, from the outermost."""

    def _equation(
        self, eqn: JaxprEqn, inputs: list[Any], frame: Frame, here: Position
    ) -> list[Any]:
        self._around.append(eqn)
        outputs = self._emit(eqn, inputs, frame, here)
        self._around.pop()
        inside = bool(internals.inner_jaxprs(eqn))
        if self.culprit is None and not inside and eqn.primitive not in (mark_p, ambient_p):
            self._inspect(eqn, inputs, outputs, frame)
        if eqn.primitive is mark_p and eqn.params["tag"].role == "value":
            values = _floats(outputs[0])
            if values is not None and not np.isfinite(values).all():
                self.bad.append(full_name(eqn.params["tag"]))
        return outputs

    def _inspect(self, eqn: JaxprEqn, inputs: list[Any], outputs: list[Any], frame: Frame) -> None:
        before = [_floats(value) for value in inputs]
        if eqn.primitive.name == "select_n" and not self.bad:
            # NaN throughout, though no tensor was bad so far: a mark for what is wrong, as meant.
            before = [v for v in before if v is None or not v.size or not np.isnan(v).all()]
        for output in outputs:
            values = _floats(output)
            if values is None or np.isfinite(values).all():
                continue
            had_nan = any(v is not None and np.isnan(v).any() for v in before)
            had_other = any(v is not None and not np.isfinite(v).all() for v in before)
            nan = np.isnan(values).any()
            # Infinities may be meant (a mask); a NaN never is, so it may also come of infinities.
            if (had_nan if nan else had_other) and eqn.primitive is not dequeue_p:
                continue
            bad = np.isnan(values) if nan else np.isinf(values)
            finite = [v[np.isfinite(v)] for v in before if v is not None and np.isfinite(v).any()]
            together = np.concatenate([v.ravel() for v in finite]) if finite else np.array([np.nan])
            chain = [*self._around, eqn]
            self.culprit = Culprit(
                eqn.primitive.name if eqn.primitive is not dequeue_p else INFEED,
                "/".join(internals.scope_names(chain)),
                next(filter(None, map(internals.user_frame, reversed(chain))), ""),
                int(frame.microbatch()),
                float(together.min()),
                float(together.max()),
                int(np.argwhere(bad)[0][0]) if bad.ndim else -1,
                "NaN" if nan else "Inf",
                any(map(internals.is_backward, chain)),
            )
            return

    def _touches(self, eqn: JaxprEqn, here: Position) -> bool:
        return bool(internals.inner_jaxprs(eqn))

    def _emit(self, eqn: JaxprEqn, inputs: list[Any], frame: Frame, here: Position) -> list[Any]:
        if eqn.primitive is dequeue_p:
            return frame.blocks[queue_of(eqn)].take()
        if internals.inner_jaxprs(eqn) and not internals.is_custom(eqn) and _opaque(eqn):
            return internals.bind_again(eqn, inputs)
        return super()._emit(eqn, inputs, frame, here)

    def _scan(self, eqn: JaxprEqn, inputs: list[Any], frame: Frame, here: Position) -> list[Any]:
        consts_count, carry_count = internals.scan_sizes(eqn)
        consts, carry = inputs[:consts_count], inputs[consts_count : consts_count + carry_count]
        xs = inputs[consts_count + carry_count :]
        body, length = eqn.params["jaxpr"], eqn.params["length"]
        order = range(length)[::-1] if eqn.params["reverse"] else range(length)
        kept: dict[int, list[Any]] = {}
        for number in order:
            inside = frame.inner()
            values = [*consts, *carry, *(x[number] for x in xs)]
            out = self.run(body.jaxpr, body.consts, values, inside, (*here, 0))
            carry, kept[number] = out[:carry_count], out[carry_count:]
        ys = [jnp.stack(each) for each in zip(*(kept[n] for n in range(length)), strict=True)]
        if not ys:
            avals: list[Any] = [var.aval for var in eqn.outvars[carry_count:]]
            ys = [jnp.zeros(aval.shape, aval.dtype) for aval in avals]
        return [*carry, *ys]

    def _while(self, eqn: JaxprEqn, inputs: list[Any], frame: Frame, here: Position) -> list[Any]:
        params = eqn.params
        tests, consts = params["cond_nconsts"], params["body_nconsts"]
        test, body = params["cond_jaxpr"], params["body_jaxpr"]
        carry = inputs[tests + consts :]
        while bool(self.run(test.jaxpr, test.consts, [*inputs[:tests], *carry], frame)[0]):
            values = [*inputs[tests : tests + consts], *carry]
            carry = self.run(body.jaxpr, body.consts, values, frame.inner(), (*here, 1))
        return carry

    def _cond(self, eqn: JaxprEqn, inputs: list[Any], frame: Frame, here: Position) -> list[Any]:
        index, *operands = inputs
        branches = eqn.params["branches"]
        number = int(np.clip(int(index), 0, len(branches) - 1))
        branch = branches[number]
        return self.run(branch.jaxpr, branch.consts, operands, frame, (*here, number))


def find_culprit(traced: Any, args: list[Any], frame: Frame) -> Finder:
    """Run a program eagerly on `args`; what made its first bad value, and which tensors are bad."""
    finder = Finder()
    finder.run(traced.jaxpr, traced.consts, args, frame)
    return finder


def step_block(leaves: list[np.ndarray]) -> Block:
    """Elements kept on the host, as the block that a replay reads."""
    return Block(tuple(jnp.asarray(leaf) for leaf in leaves))


def _opaque(eqn: JaxprEqn) -> bool:
    known = (primitives.scan_p, primitives.while_p, primitives.cond_p)
    return eqn.primitive not in known and internals.contents(eqn) is None


def _floats(value: Any) -> np.ndarray | None:
    dtype = getattr(value, "dtype", None)
    if dtype is None:
        return np.asarray(value, np.float64) if isinstance(value, float) else None
    if not jnp.issubdtype(dtype, jnp.floating):
        return None
    return np.asarray(jnp.asarray(value).astype(jnp.float32))
