"""Looking back: past steps run again, and compared with what was recorded of them.

    checkpoint, dataset ──▶ Rerun (a separate engine) ──▶ compared with what was recorded ──▶ Replay

`recorded` says what is known of a past step, `rerun` runs steps again, `replay` compares. The trainer
whose past it is takes no part in it and stays as it was.
"""
