"""Checkpoints: everything that determines the rest of a training, to disk and back.

    engine, fit ── Snapshot ──▶ CheckpointWriter (a thread) ──▶ CheckpointDirectory ──▶ Orbax
                                                                       │
    engine, fit ◀── Snapshot ◀──────────── take_up ◀───────────────────┘

`snapshot` defines the content of a checkpoint, `directory` its place and lifetime; `writer` writes in a
thread, so that training does not wait for the disk. Only `orbax_files` uses Orbax.
Rule: a checkpoint is complete or absent, and never ahead of its run directory.
"""
