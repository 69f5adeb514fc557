"""Crash-safe files: atomic, durable, locked.

In: bytes and JSON for a directory. Out: files that are complete or absent.
Rule: a writer takes the lock first, and accesses the directory through `held.HeldDirectory`, which
follows no links; directories of checkpoints too. `files` defines the layout of a run directory; change
it there first.
"""
