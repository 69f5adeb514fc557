"""`trainer.profile`: some executions on copies of the state, watched operation by operation."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

from tailrace.base.checks import check_count
from tailrace.feeds.feed import Feed, Staged
from tailrace.jaxprs.internals import separate_kernels
from tailrace.profiling.profile.measured import profile_of
from tailrace.profiling.profile.profile import Profile
from tailrace.profiling.programs.device_operations import DeviceProfiler
from tailrace.profiling.programs.hlo_text import Instruction
from tailrace.program.running.loop_state import Numbers
from tailrace.trainer.engine import Engine
from tailrace.trainer.fitting.pace import Pace

PROFILED = 10
"""Steps of an execution that is watched, where nothing says how many there are."""

_ARGUMENT = re.compile(r"^(carried|read|elements|numbers)\[?(\d*)")


def profiled(
    engine: Engine, dataset: object, executions: int, pace_of: Callable[[Engine], Pace]
) -> Profile:
    """The profile of some executions on a dataset; afterwards all is as before.

    Args:
        engine: what trains.
        dataset: what it reads meanwhile.
        executions: how many are watched; one more runs before them.
        pace_of: how many steps they have, once the program is known.
    """
    check_count("executions", executions, at_least=1)
    feed = engine.use(dataset)
    try:
        pace = pace_of(engine)
        engine.runner.capacity = pace.capacity(engine.runner.capacity, None)
        return _watched(engine, pace.chosen or min(PROFILED, pace.most), executions)
    finally:
        engine.let_go(dataset, feed)


def _watched(engine: Engine, steps: int, executions: int) -> Profile:
    """The profile of executions of the program in use."""
    runner, state = engine.runner, engine.loop_state.copied()
    period, numbers = engine.sight.period, Numbers(engine.seed, engine.step)
    # To be put back: a profile leaves no trace in the counts of the trainer.
    executed, compiled_s, keeps = runner.executions, runner.compile_s, runner.keep_elements
    taken: list[Mapping[Feed, Staged]] = []
    profiler = DeviceProfiler(None)
    runner.keep_elements = True
    # A GPU launches many kernels as one graph, of which a profiler sees only the graph.
    runner.separate = bool(separate_kernels(engine.placement.device.platform))

    def run(number: int) -> Any:
        following = 0 if number == executions else steps
        _, ticket = runner.dispatch(state, steps, numbers.after(number * steps), following, period)
        taken.append(runner.taken)
        return ticket

    try:
        ticket = jax.block_until_ready(run(0))  # it is compiled, and everything is warm
        program = runner.compiled(state, steps, period).compiled
        profiler.before(program)
        started = time.perf_counter()
        for number in range(1, executions + 1):
            ticket = run(number)
        jax.block_until_ready(ticket)
        wall = time.perf_counter() - started
    finally:
        profiler.stop()
        runner.keep_elements, runner.separate, runner.origin = keeps, False, None
        runner.executions, runner.compile_s = executed, compiled_s
        # The last block first: what is put back last is read first.
        for blocks in reversed(taken):
            for feed, staged in blocks.items():
                feed.put_back(staged, 0)  # as if they had not been read
    return profile_of(
        profiler,
        steps=steps * executions,
        executions=executions,
        wall_s=wall,
        device=engine.placement.device,
        owner=_owner_of(engine),
        plan=engine.plan if engine.pipeline is not None else None,
    )


def _owner_of(engine: Engine) -> Callable[[Instruction], str]:
    """Whose each argument of the compiled program is."""
    paths = jax.tree_util.tree_flatten_with_path(engine.form)[0]
    carried = engine.runner.compiled_carries
    kinds = {
        "params": "parameters",
        "optimizer_state": "optimizer state",
        "model_state": "model state",
        "state": "state",
        "loss_scale": "loss scale",
    }

    def owner(argument: Instruction) -> str:
        found = _ARGUMENT.match(argument.op_name)
        if found is None or found[1] != "carried" or not found[2]:
            what = found[1] if found else ""
            return {"elements": "elements", "read": "constants"}.get(what, "loop")
        # A buffer of a pipeline may hold leaves of several kinds.
        leaves = engine.runner.layout.leaves_in(carried[int(found[2])])
        held = dict.fromkeys(kinds[paths[leaf][0][0].name] for leaf in leaves)
        return " and ".join(held) or "loop"

    return owner
