"""`trainer.explain`: what training on elements of a form will need."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from tailrace.base.trees import Tree
from tailrace.data.no_data import NO_DATA
from tailrace.errors import TailraceError
from tailrace.feeds.elements import effective_batch_size
from tailrace.pipeline.running.pipeline_runner import PipelineRunner
from tailrace.pipeline.running.report import report as pipeline_report
from tailrace.program.step.update_rule import example_extra
from tailrace.trainer.costs.explanation import Explanation, explain, flops_of
from tailrace.trainer.engine import Engine


def explained(engine: Engine, example: Tree, length: int) -> Explanation:
    """The cost of training on elements like `example`, with `length` steps per execution."""
    feed = engine.use(NO_DATA if example is None else [example])
    state, count = engine.state, engine.accumulation.microbatches
    batch = effective_batch_size(feed.spec(), count * engine.placement.replicas)
    explanation = explain(
        engine.runner,
        engine.loop_state,
        length,
        parts=state.parts,
        keeping=engine.memory.keeping,
        decisions=engine.memory.all_decisions,
        effective_batch_size=batch,
        microbatches=count,
        flops_of_update=flops_of_update(engine),
    )
    if isinstance(engine.runner, PipelineRunner):
        # Stages have unequal parts of the state: what a device needs is the largest of them.
        stages = pipeline_report(engine.runner.assembly, timed=False)
        whole = ("parameters", "optimizer state", "model state")
        rest = {name: n for name, n in explanation.parts.items() if name not in whole}
        parts = {"parameters and state of stages": max(stages.held), **rest}
        explanation = dataclasses.replace(explanation, parts=parts, pipeline=stages)
    return explanation


def flops_of_update(engine: Engine) -> float:
    """The FLOPs of the optimizer per step."""
    optimizer, state, keeping = engine.optimizer, engine.state, engine.memory.keeping
    if not jax.tree.leaves(state.params):  # it is inside the step, and counted there
        return 0.0
    # Optimizers of front ends have `apply` in place of optax' `update`.
    update = getattr(optimizer, "apply" if hasattr(optimizer, "apply") else "update")
    held = keeping.forms if keeping is not None else state.optimizer_state
    needs = engine.step_function.needs

    def given(grads: Tree, held: Tree, params: Tree) -> Any:
        # As the step calls it, or lowering fails.
        return update(grads, held, params, **example_extra(needs, grads))

    try:
        return flops_of(jax.jit(given).lower(state.params, held, state.params))
    except TailraceError:  # it means something inside a program only: small beside the rest
        return 0.0
