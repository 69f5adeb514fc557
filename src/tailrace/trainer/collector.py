"""From the emissions of an execution to its results on the host."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping
from typing import Any

import jax
import numpy as np

from tailrace.errors import FeedError
from tailrace.feeds.outfeed import OutfeedQueue
from tailrace.program.running.loop_runner import LoopRunner
from tailrace.program.step.loss_scale import NAME as SCALE
from tailrace.program.step.loss_scale import LossScale, note_collapse
from tailrace.program.tracing.tap_selection import Sight
from tailrace.records.history import SKIPPED, one_of, split_emission
from tailrace.records.records import take_records
from tailrace.taps.frame import Emission
from tailrace.taps.tap import StopOnNonfinite
from tailrace.trainer.executions import Results, Ticket
from tailrace.trainer.observation.nonfinite_guard import BadStep, bad_steps, first_bad_step
from tailrace.trainer.sentinel import Sentinel
from tailrace.trainer.state_digests import StateDigests


@dataclasses.dataclass(frozen=True, eq=False)
class Collector:
    """Reads what executions emitted.

    Attributes:
        scalars: the outfeed of losses, metrics and weights.
        microbatches: the number of microbatches per step.
        loss_scale: the rule of loss scaling, if there is one.
        guard: the guard against values that are not finite, if there is one.
        digests: computes fingerprints, if they were requested.
        sentinel: compares executions that ran twice, if one does.
    """

    scalars: OutfeedQueue
    microbatches: int
    loss_scale: LossScale | None
    guard: StopOnNonfinite | None
    digests: StateDigests | None
    sentinel: Sentinel | None

    def sent(self, runner: LoopRunner, emitted: Mapping[Hashable, Emission]) -> Any:
        """The losses, metrics and weights among a program's emissions."""
        structure = runner.traced.outfeeds[self.scalars].structure
        return jax.tree.unflatten(structure, emitted[self.scalars].value)

    def scalars_on_device(
        self, runner: LoopRunner, emitted: Mapping[Hashable, Emission]
    ) -> dict[str, Any]:
        """Loss and metrics by name, not waited for; empty if they were muted."""
        if self.scalars not in emitted:
            return {}
        return _scalars(self.sent(runner, emitted))

    def bad_step(self, ticket: Ticket, runner: LoopRunner) -> BadStep | None:
        """The step at which a guard stops an execution, if it does; waits for the execution."""
        if self.guard is None or self.guard.skips:
            return None
        return first_bad_step(ticket.emitted, runner.placement.replicas)

    def results(self, ticket: Ticket, runner: LoopRunner, sight: Sight) -> Results:
        """The results of an execution; of one without steps, the names of its scalars.

        Args:
            ticket: the execution.
            runner: its program.
            sight: the tensors that taps select in it.
        """
        # A copy: the scalars are taken out of it, and a sentinel reads those of the ticket again.
        replicas, emitted = runner.placement.replicas, dict(ticket.emitted)
        sent, parts = self.sent(runner, emitted), []
        emitted.pop(self.scalars)
        if ticket.steps:
            parts = take_records(
                emitted,
                sight.chosen,
                first_step=ticket.first_step,
                steps=ticket.steps,
                replicas=replicas,
                period=sight.period,
            )
        values = _scalars(sent)
        arrays = {name: self._split(v, replicas)[: ticket.steps] for name, v in values.items()}
        vectors = {
            name: split_emission(v, self.microbatches, replicas, np.ndim(one_of(values)))
            for name, v in sent.get("arrays", {}).items()
        }
        weights = sent["weight"]
        if weights is not None:
            # Sums of weights may count rows, and float32 is exact for counts up to 2**24 only.
            weights = self._split(weights, replicas)[: ticket.steps].astype("float64")
        if self.loss_scale is not None and not self.loss_scale.is_fixed and ticket.steps:
            note_collapse(float(arrays[SCALE][-1, 0, 0]))
        if self.guard is not None and self.guard.skips:
            # One flag a step, in the shape of the losses: all columns of a history have that shape, and
            # so it goes into checkpoints and run directories like any other.
            skipped = bad_steps(emitted, replicas)[:, None, None]
            arrays[SKIPPED] = np.broadcast_to(skipped, one_of(arrays).shape)
        marks, elements = {}, None
        if self.digests is not None and ticket.steps:
            marks, elements = self.digests.of(ticket, one_of(arrays))
        # A step that is not finite is reported as such: the second run has the same one.
        if self.sentinel is not None and ticket.watch is not None:
            again = ticket.watch.emitted
            losses = again and self._split(one_of(_scalars(self.sent(runner, again))), replicas)
            self.sentinel.check(ticket, marks, one_of(arrays), losses)
        failure = None
        # Last: steps that ran count, also where an outfeed cannot take what they sent.
        try:
            if ticket.steps:  # what is left for outfeeds is the user's
                runner.traced.deliver(emitted)
        except FeedError as error:
            failure = error
        return Results(
            ticket.first_step,
            ticket.steps,
            parts,
            arrays,
            weights,
            {name: vector[: ticket.steps] for name, vector in vectors.items()},
            failure=failure,
            fingerprint=marks,
            elements=elements,
            reading=ticket.reading,
        )

    def _split(self, value: object, replicas: int) -> np.ndarray:
        """An emission as [steps, microbatches, replicas], on the host."""
        return split_emission(value, self.microbatches, replicas)


def _scalars(sent: Any) -> dict[str, Any]:
    """Loss and metrics by name; a step of the user's own may have no loss."""
    loss = {"loss": sent["loss"]} if "loss" in sent else {}
    return {**loss, **sent["aux"]}
