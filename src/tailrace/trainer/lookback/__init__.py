"""Looking back: past steps run again, and compared with what was recorded of them.

    checkpoint, dataset ──▶ Rerun (a separate engine) ──▶ compared with what was recorded ──▶ Replay

`recorded` says what is known of a past step, `rerun` runs steps again, `replay` compares; `handed` does
so for front ends, whose own loops read the data. `explain_step`, `bisect`, `rewind` and `bundled` use
these.
Rule: a separate engine runs the steps. The trainer whose past it is stays as it was, except for
`rewind`, which gives it the state that was found.
"""
