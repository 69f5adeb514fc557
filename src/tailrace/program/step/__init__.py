"""One optimizer update: gradients, accumulation, reduction over replicas.

In: a loss function, an optimizer, and options for accumulation, loss scale and precision.
Out: a `Step`, whose `loop` is the body of a training program, and `TrainState`, which it carries.

    training_step     what every step does once: reduction over replicas, update, names
    whole_step        what steps that are not cut into stages have in common
    plain_step        microbatches of a model that is differentiated as a whole
    own_step          a step that the user wrote, of which nothing else is known
    accumulation      how the gradients of microbatches become one
    update_rule       the update, by optax or by an optimizer of another library
    averaging         an average of the parameters over the steps
    loss_again        the loss as a function of parameters, for line searches
    step_sharding     where the values of a sharded model are
    loss_scale        scaled losses, and steps that are skipped; precision: narrower computation

Rules: pure functions of arrays; placement is decided elsewhere. There are three kinds of `Step`:
`PlainStep`; `PipelineStep` in `pipeline/lowering`, the same step in stages, which must compute the
same numbers; and `OwnStep`. Of the first two only `finish` changes parameters and optimizer state.
"""
