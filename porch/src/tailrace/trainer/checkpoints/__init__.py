"""Checkpoints: everything that decides the rest of a training, on disk and back.

    engine, fit ── Snapshot ──▶ CheckpointWriter (a thread) ──▶ CheckpointDirectory ──▶ Orbax
                                                                       │
    engine, fit ◀── Snapshot ◀──────────── take_up ◀───────────────────┘

`snapshot` says what a checkpoint holds, `directory` where it is and how long it is kept, `writer` that
training does not wait for the disk, `orbax_files` what we know of Orbax, and nothing else does.
"""
