"""Measurements: `python -m benchmarks.feeds`, `python -m benchmarks.accumulation`."""
