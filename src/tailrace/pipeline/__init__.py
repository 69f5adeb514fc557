"""Pipelines: the plan (what runs where and when), its proof, its picture and its price."""

from tailrace.pipeline.cuts import balanced_cut
from tailrace.pipeline.figure import compare_plans
from tailrace.pipeline.grid import Drawing
from tailrace.pipeline.planning import Plan, plan
from tailrace.pipeline.simulator import Simulation, SimulationMode
from tailrace.pipeline.stash import StashBytes
from tailrace.pipeline.timetable import Timetable
from tailrace.pipeline.timing import Phases, PipelineSchedule
from tailrace.pipeline.units import Tick, Unit
from tailrace.pipeline.whatif import Case, WhatIf, what_if

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
