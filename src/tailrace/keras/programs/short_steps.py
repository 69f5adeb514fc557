"""Single steps, one after the other, at little more than the cost of Keras' own loop.

An execution may have any length, any number of devices, taps, traces and callbacks inside it, and looks
up each time which of them there are. For a long execution that is nothing; for a small model with a
callback for each batch it takes longer than the step. What held for the latest step holds for the next
one while the program, the fit and the form of the batches are the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from tailrace.keras.data.batch_source import Batches, Form
from tailrace.keras.data.resident_batches import ResidentBatches
from tailrace.keras.programs.logs import Final, Values
from tailrace.trainer.engine import Engine


class ShortSteps:
    """Steps that only differ in their batch from the step that was dispatched last.

    Args:
        engine: the engine; nothing comes out of its program but loss and metrics.
        form: the form of the batches.
        names: the metrics that are numbers.
    """

    def __init__(self, engine: Engine, form: Form, names: list[str]) -> None:
        self.form = form
        self._engine, self._runner = engine, engine.runner
        structure = self._runner.traced.outfeeds[engine.scalars].structure
        # Unflattened once, with numbers in place of values: a step then only looks up its metrics.
        places = jax.tree.unflatten(structure, range(structure.num_leaves))["aux"]
        self._places = [(name, places[f"metrics/{name}"]) for name in names]

    def run(self, batches: Batches | ResidentBatches) -> tuple[Any, Mapping[str, Values]] | None:
        """Dispatch the next step: an array that is ready afterwards, and its metrics.

        None if the next batch cannot take the short path; it is then still the next one.
        """
        engine = self._engine
        # Another form of batches, or a loop of fixed length that took over, is another program.
        if engine.runner is not self._runner:
            return None
        elements = batches.next_of(self.form)
        if elements is None:
            return None
        sent, ready = engine.dispatch_next(elements)
        return ready, {name: Final(sent[place]) for name, place in self._places}
