"""Schedules as plain data: plan, check, simulate.

In: stages, microbatches, a schedule, a device mapping.
Out: a `Plan`: which device runs which unit in which tick; its proof, price and predicted time.

    device_mapping, units, schedules     what users write, in one form; the rule of each schedule
    planned_ticks, plan, timetable       the ticks: as data, as what users hold, as arrays
    plan_check, stash                    the proof of a plan, and the memory between F and B
    costs, simulator, free_run, what_if  its time, from the times of stages
    notation                             as text and as JSON

Rules: plain data and arithmetic; nothing here imports JAX. A plan is never changed: another one is
made. The executor reads it and never decides order itself. What reads a plan here and
in `drawing` takes `PlannedTicks`; users and the rest of Tailrace hold a `Plan`.
"""
