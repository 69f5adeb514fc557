"""`fit(checkpoint=)` of Keras models, by the files of `tr.Trainer`: `trainer/checkpoints`.

    KeptCallbacks ── when ──▶ Keeping ── Snapshot ──▶ CheckpointWriter ──▶ files
         ▲                       │
         └── Keras' loop         └── Kept ──▶ Executions: what to count along and to skip

Keras' loop runs from the epoch of the checkpoint on. It counts through the batches that were done
before; they are not computed, and callbacks are not called for them again.

Rule: `keeping` alone reads and writes the note of a checkpoint; `kept_callbacks` alone decides when one
is taken, because it knows where Keras' loop is.
"""
