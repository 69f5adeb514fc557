"""Checkpoints of a training whose loop is the user's own, by the files of `tr.Trainer`.

the user's loop ── asks for a batch ──▶ Keeping ── Snapshot ──▶ CheckpointWriter ──▶ files
                                           │
model.resume() ◀── where to go on ─────────┘

keeping         what is saved when, and what is restored
plain_states    states of PyTorch's objects, as JSON and arrays
schedulers      the schedulers that the loop steps itself
start           where the loop goes on
"""
