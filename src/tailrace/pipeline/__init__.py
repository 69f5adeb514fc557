"""Pipelines: a model in stages on several devices, computing what the plain step computes.

In: a model with boundaries (`pipeline`, `boundary`), and the devices of its stages.
Out: a plan, which says what runs where and when, and a device program that follows it.

    schedule, drawing        the plan: made, proved, priced, drawn; without JAX
    lowering                 from the model to stages, and to the work of each device
    running                  one program for all devices, and state in their buffers
    balance, balance_cuts    where to cut, so that stages take equally long
    shared_weights           weights that several stages have in common

Rules. Order comes from the plan alone. Results are those of the unpipelined step: what must be equal is
bit-equal, and tests compare them. `trainer` knows pipelines by `Pipeline`, `PipelineStep` and
`PipelineRunner`; nothing below `pipeline` knows them at all.
"""

from tailrace.pipeline.balance_cuts import balanced_cut
from tailrace.pipeline.drawing.figure import compare_plans
from tailrace.pipeline.drawing.grid import Drawing
from tailrace.pipeline.schedule.plan import Plan, plan
from tailrace.pipeline.schedule.schedules import Phases, PipelineSchedule
from tailrace.pipeline.schedule.simulator import Simulation, SimulationMode
from tailrace.pipeline.schedule.stash import StashBytes
from tailrace.pipeline.schedule.timetable import Timetable
from tailrace.pipeline.schedule.units import Tick, Unit
from tailrace.pipeline.schedule.what_if import Case, WhatIf, what_if

__all__ = [
    "Case",
    "Drawing",
    "Phases",
    "PipelineSchedule",
    "Plan",
    "Simulation",
    "SimulationMode",
    "StashBytes",
    "Tick",
    "Timetable",
    "Unit",
    "WhatIf",
    "balanced_cut",
    "compare_plans",
    "plan",
    "what_if",
]
