"""One device program: tracing it, its loops, the training step, and running it.

In: a Python function, its feeds, and taps.
Out: a device program, dispatched in pieces; its emissions, by key.

    compile, loops, observe, mark         the public functions, with those of
    in_program                            random keys, counters, reductions over replicas
    optimizers                            optax wrappers for hand-written loops
    tracing                               from a function to a checked jaxpr
    step                                  the training step
    memory                                sharded optimizer state, offload of state and activations
    compiling                             lowered programs to executables
    running                               executables, their state, and dispatch lengths
    nonfinite                             finds the operation that made the first NaN or Inf

Rules. No epochs and no callbacks: those belong to `trainer`. Equations are read through `jaxprs`. Only
`running` dispatches; everything before it is a pure function of shapes.
"""
