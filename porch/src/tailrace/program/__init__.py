"""One device program: tracing, loops, steps, and how they are run.

In: a Python function, its feeds, and taps.
Out: a device program, dispatched in pieces; what it emitted, by key.

    compile, loops, observe, in_program   what users call
    tracing                               from a function to a checked jaxpr
    step                                  the training step
    memory                                state and activations elsewhere than on the device
    running                               executables and what they work on

Rule: no epochs and no callbacks here; that is `trainer`. Equations are read through `jaxprs`.
"""
