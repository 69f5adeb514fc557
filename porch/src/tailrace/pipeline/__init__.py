"""Pipelines: the plan (what runs where and when), its proof, its picture and its price."""

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
