"""Files that survive a crash: atomic, durable, locked.

In: bytes and JSON for a directory. Out: files that are whole or absent.
Rule: a writer takes the lock first, and reaches the directory through `held.HeldDirectory`, which
follows no links; directories of checkpoints too. `files` has the layout
of a run directory; change it there first.
"""
