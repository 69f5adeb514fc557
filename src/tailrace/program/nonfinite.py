"""Finds the operation with the first NaN or Inf: runs a step again, one operation at a time.

Slow, and only used after a guard has stopped the training. Loops are unrolled, so that the iteration is
known; everything is computed eagerly, so that operands can be inspected.
"""

# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Generator
from typing import Any

import jax.numpy as jnp
import numpy as np

from tailrace.jaxprs import convolutions, internals
from tailrace.jaxprs.control import Call, Cond, Scan, While, programs_in
from tailrace.jaxprs.internals import JaxprEqn
from tailrace.jaxprs.operations import is_select, name_of
from tailrace.jaxprs.own_equations import ambient_in, is_dequeue, tag_in
from tailrace.jaxprs.visitor import Visitor
from tailrace.jaxprs.walk import Position
from tailrace.program.tracing.tap_selection import full_name
from tailrace.program.tracing.trace import Traced
from tailrace.taps.frame import Block, Frame
from tailrace.taps.resolver import Resolver

INFEED = "infeed"
"""The operation of a culprit if the bad value was in the data."""


@dataclasses.dataclass(frozen=True)
class Culprit:
    """The origin of the first bad value.

    Attributes:
        operation: the name of the operation.
        scope: the named scopes around it.
        source: `file:line` of the user's code.
        microbatch: the index of the microbatch in the step.
        low: the smallest finite value of its operands.
        high: the largest finite value of its operands.
        row: the first index along the leading dim where the result is bad; -1 for a scalar.
        made: the bad value: "NaN" or "Inf".
        backward: whether it belongs to the backward pass.
        dataset_row: for bad data from `tr.batches`, the number of that row in its arrays; else -1.
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
    dataset_row: int = -1

    def __str__(self) -> str:
        where = f" in {self.scope!r}" if self.scope else ""
        line = f" at {self.source}" if self.source else ""
        way = " of the backward pass" if self.backward else ""
        row = f", first in row {self.row}" if self.row >= 0 else ""
        if self.operation == INFEED:
            row = f", first in row {self.row} of the element" if self.row >= 0 else ""
            row += f" (row {self.dataset_row} of the dataset)" if self.dataset_row >= 0 else ""
            return f"The element from the dataset itself holds the first {self.made}{row}"
        return (
            f"The operation {self.operation!r}{way}{where}{line} made the first {self.made}{row}; "
            f"its operands ranged from {self.low:.6g} to {self.high:.6g}"
        )


class Finder(Visitor[Any, Frame]):
    """Runs a program eagerly and records the first operation with good operands and a bad result.

    Loops run iteration by iteration; of a choice, only the taken branch runs.
    """

    def __init__(self) -> None:
        self.culprit: Culprit | None = None
        self.bad: list[str] = []
        self._chain: list[JaxprEqn] = []
        """The current equation, preceded by those around it, outermost first."""
        self._resolver = Resolver()

    @contextlib.contextmanager
    def context(self, eqn: JaxprEqn) -> Generator[None]:
        """Track the equations around an equation."""
        self._chain.append(eqn)
        try:
            with internals.equation_context(eqn):
                yield
        finally:
            self._chain.pop()

    def made(
        self,
        eqn: JaxprEqn,
        inputs: list[Any],
        outputs: list[Any],
        around: Frame,
        here: Position,
    ) -> list[Any]:
        """Inspect the results of an operation, and named values."""
        tag = tag_in(eqn)
        looks = self.culprit is None and tag is None and ambient_in(eqn) is None
        # Not around a loop or a call: its contents were inspected already, operation by operation.
        if looks and not programs_in(eqn):
            self._inspect(eqn, inputs, outputs, around)
        if tag is not None and tag.role == "value":
            values = _floats(outputs[0])
            if values is not None and not np.isfinite(values).all():
                # All names, also after the culprit is found: the message says which tensors it has
                # reached.
                self.bad.append(full_name(tag))
        return outputs

    def _inspect(self, eqn: JaxprEqn, inputs: list[Any], outputs: list[Any], frame: Frame) -> None:
        before = [_floats(value) for value in inputs]
        if is_select(eqn) and not self.bad:
            # All NaN, though no tensor was bad so far: the program marks an error on purpose.
            before = [v for v in before if v is None or not v.size or not np.isnan(v).all()]
        for output in outputs:
            values = _floats(output)
            if values is None or np.isfinite(values).all():
                continue
            # Operands that were bad already: then the operation only passes on what another one made.
            had_nan = any(v is not None and np.isnan(v).any() for v in before)
            had_other = any(v is not None and not np.isfinite(v).all() for v in before)
            nan = np.isnan(values).any()
            # An Inf may be intended (a mask), a NaN never is; so a NaN made from infinities counts.
            if (had_nan if nan else had_other) and not is_dequeue(eqn):
                continue
            bad = np.isnan(values) if nan else np.isinf(values)
            finite = [v[np.isfinite(v)] for v in before if v is not None and np.isfinite(v).any()]
            together = np.concatenate([v.ravel() for v in finite]) if finite else np.array([np.nan])
            chain = self._chain
            self.culprit = Culprit(
                INFEED if is_dequeue(eqn) else name_of(eqn),
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

    def plain(self, eqn: JaxprEqn, inputs: list[Any], around: Frame, here: Position) -> list[Any]:
        """Run one operation."""
        outputs = self._resolver.resolve(eqn, inputs, around)
        return convolutions.bind_again(eqn, inputs) if outputs is None else outputs

    def call(self, call: Call, inputs: list[Any], around: Frame, here: Position) -> list[Any]:
        """Run the contents; in a recomputation, marks are ignored."""
        replaying = around.replaying
        around.replaying = replaying or call.is_replay
        outputs = self.run_inner(call.program, inputs, around, here)
        around.replaying = replaying
        return outputs

    def scan(self, scan: Scan, inputs: list[Any], around: Frame, here: Position) -> list[Any]:
        """Run it iteration by iteration."""
        consts, carry, xs = scan.split(inputs)
        order = range(scan.length)[::-1] if scan.reverse else range(scan.length)
        kept: dict[int, list[Any]] = {}
        for number in order:
            values = [*consts, *carry, *(x[number] for x in xs)]
            out = self.run_inner(scan.body, values, around.inner(), here)
            carry, kept[number] = scan.split_results(out)
        ys = [jnp.stack(each) for each in zip(*(kept[n] for n in range(scan.length)), strict=True)]
        if not ys:
            avals: list[Any] = [var.aval for var in scan.split_results(scan.eqn.outvars)[1]]
            # A loop of no iterations still has stacked results, with no rows.
            ys = [jnp.zeros(aval.shape, aval.dtype) for aval in avals]
        return [*carry, *ys]

    def while_loop(
        self, loop: While, inputs: list[Any], around: Frame, here: Position
    ) -> list[Any]:
        """Run it iteration by iteration."""
        tests, consts, carry = loop.split(inputs)
        while bool(self.run_inner(loop.condition, [*tests, *carry], around, here)[0]):
            carry = self.run_inner(loop.body, [*consts, *carry], around.inner(), here)
        return carry

    def cond(self, cond: Cond, inputs: list[Any], around: Frame, here: Position) -> list[Any]:
        """Run the taken branch."""
        index, operands = cond.split(inputs)
        # As `lax.switch` does with an index out of range.
        number = int(np.clip(int(index), 0, len(cond.branches) - 1))
        return self.run_inner(cond.branches[number], operands, around, here)


def find_culprit(traced: Traced, args: list[Any], frame: Frame) -> Finder:
    """Run a program eagerly on `args`, to find the first bad value and the bad tensors."""
    finder = Finder()
    finder.run(traced.jaxpr, traced.consts, args, frame)
    return finder


def step_block(leaves: list[np.ndarray]) -> Block:
    """Elements kept on the host, as a block for a replay to read."""
    return Block(tuple(jnp.asarray(leaf) for leaf in leaves))


def _floats(value: object) -> np.ndarray | None:
    dtype = getattr(value, "dtype", None)
    if dtype is None:
        return np.asarray(value, np.float64) if isinstance(value, float) else None
    if not jnp.issubdtype(dtype, jnp.floating):
        return None
    return np.asarray(jnp.asarray(value).astype(jnp.float32))
