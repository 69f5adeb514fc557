"""Training: an engine that runs steps, and the trainer that drives it.

    engine ──▶ tickets ──▶ results ──▶ journal (history, records, run directory)
      ▲                                   │
    fitting (epochs, validation, signals) ─┴─▶ callbacks, checkpoints

    training_programs, held_state, collector   the parts of the engine
    own_steps      a trainer of a step that the user wrote, and the options that it refuses
    model_place    the options that say where a model is: mesh=, shard=, device=
    costs          memory and time: planned, explained, measured
    observation    the journal, and what is written of a run
    lookback       steps that ran, run again
    evaluation, modules, showing

`engine` is what Keras, PyTorch and IPU programs drive too, with the journal and checkpoints; everything
else here is for `tr.Trainer`.
Rules. Only an engine changes training state: by dispatches, and by `replace`. Results reach users only
through a journal. An engine knows nothing of epochs, callbacks or files.
"""
