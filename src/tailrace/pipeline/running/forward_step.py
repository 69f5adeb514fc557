"""Forward pipelines: evaluation and prediction, stage by stage, without a backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from tailrace.base.trees import Tree
from tailrace.feeds.feed import Feed
from tailrace.feeds.outfeed import OutfeedQueue
from tailrace.jaxprs.marks import Tag, current_trace, inside_loop, mark
from tailrace.pipeline.lowering.cut import cut_function
from tailrace.pipeline.lowering.forward_backward import forward_stages
from tailrace.pipeline.lowering.stage import in_unit, value_in
from tailrace.pipeline.pipeline import Pipeline
from tailrace.pipeline.schedule.device_mapping import placement_of, read_mapping
from tailrace.pipeline.schedule.schedules import schedule_offsets, virtual_placement
from tailrace.program.loops import repeat, repeat_with, whole

Compute = Callable[[Any, Any, Any, Any], Any]
"""`compute(params, model_state, batch, inputs)` returns the values to send out for an element."""

_ROUNDS = 4
"""Rounds of microbatches in one pass: with four, ramp-up and ramp-down cost a fifth at most."""


def microbatches_of(pipeline: Pipeline, sizes: tuple[int, ...], rounds: int = _ROUNDS) -> int:
    """The number of elements per pass of a forward pipeline."""
    placement = placement_of(read_mapping(pipeline.device_mapping, sizes))
    offsets = schedule_offsets(pipeline.schedule, virtual_placement(placement, False))
    return len(offsets) * rounds


def stages_of(compute: Compute, args: Tree) -> tuple[int, ...]:
    """The number of members of each stage of a function, from the boundaries in it."""
    return cut_function(compute, args)[0].sizes


def forward_pass(
    compute: Compute,
    read: Tree,
    infeed: Feed,
    out: OutfeedQueue,
    count: int,
    inputs: Tree,
    advances: bool = False,
) -> Any:
    """A pass over `count` elements, inside a loop: sends out the result of `compute` for each.

    With `advances`, `compute` returns `(result, next model_state)`: the model state is carried from
    element to element.
    """

    def one_pass(read: Tree) -> Any:
        params, model_state = read
        with inside_loop(current_trace("tr.Pipeline")):
            made, structure = cut_function(compute, (*read, infeed.spec().tree(), inputs))
        # Cut outside the loop over elements: the calls of stages, not their equations, are its body.
        stages = forward_stages(made, structure, advances)

        def one(carry: Tree, batch: Tree) -> Any:
            state = carry if advances else model_state
            values = stages.start(params, state, batch, inputs)
            for stage in stages.each:
                stage.call_forward(values)
            sent = stages.results[0] if advances else stages.results
            home = stages.home(jax.tree.leaves(sent))
            in_unit(home, lambda: out.enqueue(jax.tree.map(lambda v: value_in(values, v), sent)))
            if advances:
                leaves, form = jax.tree.flatten(carry)
                carry = jax.tree.unflatten(form, stages.next_state(leaves, values))
            return carry

        after = repeat_with(whole, count, one, model_state if advances else (), infeed)
        # Marked: otherwise the loop would not carry values that it does not change, and every
        # device would read all of them.
        state = after if advances else model_state
        return mark(params, Tag("held")), mark(state, Tag("held"))

    # The lowering expects a loop over steps around the one over microbatches: a pass is a step
    # without an update.
    return repeat(1, one_pass, read)
