"""Running a traced program: dispatch lengths, executables, results.

In: a traced loop, its state, and blocks of elements.
Out: emissions on the device, and an array that is ready when the dispatch is over.

    loop_runner            one loop and its executables; loop_state is what they overwrite
    executable             rewrites, compiles and dispatches; segments cut a program for it
    dispatch_lengths       into which pieces loops are cut, with the measured constants
    agreement              what processes compare before a dispatch

Rule: a dispatch waits for elements, not for results. Callers change state through a dispatch or
`LoopRunner.replace`.
"""
