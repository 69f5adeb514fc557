"""Schedules as plain data: plan, check, simulate. Nothing here imports JAX."""
