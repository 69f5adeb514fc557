"""Training: an engine that runs steps, and the trainer that drives it.

    engine ──▶ tickets ──▶ results ──▶ journal (history, records, run directory)
      ▲                                   │
    fitting (epochs, validation, signals) ─┴─▶ callbacks, checkpoints

`engine` is what Keras, PyTorch and IPU programs drive too; everything else here is for `tr.Trainer`.
"""
