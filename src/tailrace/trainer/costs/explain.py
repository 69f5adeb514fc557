"""`trainer.explain`: what training on elements of a form will need."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from tailrace.base.messages import counted, listed, size_text
from tailrace.base.trees import Tree
from tailrace.data.no_data import NO_DATA
from tailrace.devices.shard_rules import axes_text, mesh_text
from tailrace.errors import TailraceError
from tailrace.feeds.elements import effective_batch_size
from tailrace.jaxprs.marks import path_name
from tailrace.pipeline.running.pipeline_runner import PipelineRunner
from tailrace.pipeline.running.report import report as pipeline_report
from tailrace.program.step.update_rule import example_extra
from tailrace.trainer.costs.explanation import Explanation, explain, flops_of, tree_bytes
from tailrace.trainer.engine import Engine


def explained(engine: Engine, example: Tree, length: int) -> Explanation:
    """The cost of training on elements like `example`, with `length` steps per execution."""
    feed = engine.use(NO_DATA if example is None else [example])
    sharding, count = engine.placement.sharding, engine.accumulation.microbatches
    # Of a sharded model the forms say what one device holds.
    state = engine.state if sharding is None else engine.form
    batch = effective_batch_size(feed.spec(), count * engine.placement.replicas)
    explanation = explain(
        engine.runner,
        engine.loop_state,
        length,
        parts=state.parts,
        keeping=engine.memory.keeping,
        decisions=(*engine.memory.all_decisions, *sharding_decisions(engine)),
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


def sharding_decisions(engine: Engine) -> tuple[str, ...]:
    """Which parameters are sharded over the mesh, and which are not."""
    sharding = engine.placement.sharding
    if sharding is None:
        return ()
    leaves = jax.tree_util.tree_flatten_with_path(engine.form.params)[0]
    whole = [(path, form) for path, form in leaves if form.sharding.is_fully_replicated]
    own = len(leaves) - len(whole)
    said = f"{own} of {counted(len(leaves), 'parameter')} sharded over {mesh_text(sharding.given)}"
    batches = axes_text(sharding.mesh, sharding.batch_axes) if sharding.batch_axes else ""
    said += f", batches over {batches}" if batches else ", batches on every device"
    if not whole:
        return (said,)
    names = [path_name(path) or "params" for path, _ in whole]
    size = size_text(tree_bytes([form for _, form in whole]))
    return (said, f"on every device whole: {listed(names, 8)} ({size})")


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
        with engine.placement.within():
            return flops_of(jax.jit(given).lower(state.params, held, state.params))
    except TailraceError:  # it means something inside a program only: small beside the rest
        return 0.0
