"""Training: an engine that runs steps, and the trainer that drives it.

    engine ──▶ tickets ──▶ results ──▶ journal (history, records, run directory)
      ▲                                   │
    fitting (epochs, validation, signals) ─┴─▶ callbacks, checkpoints

In: a loss function, an optimizer, parameters, and a dataset. Out: trained parameters, a `History`,
records, and, on request, checkpoints and a run directory.

    engine, executions    state on the devices and the programs that advance it
    fitting               one fit: epochs, validation, signals, the length of executions (`pace`)
    evaluation            evaluate and predict
    checkpoints, bundles  state on disk
    callbacks, journal    who gets the results
    modules               Flax and Equinox modules as parameters
    lookback              replaying and explaining past steps

Rules. `engine` knows nothing of epochs, callbacks or files; Keras, PyTorch and IPU programs drive it
too. Everything else here is for `tr.Trainer`.
"""
