"""Schedules as plain data: plan, check, simulate.

In: stages, microbatches, a schedule, a device mapping.
Out: a `Plan`: which device runs which unit in which tick; its proof, price and predicted time.
Rule: plain data and arithmetic. The executor reads a plan and never decides order itself.
Nothing here imports JAX.
"""
