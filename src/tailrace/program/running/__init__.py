"""Running a traced program: dispatch lengths, executables, results.

In: a traced loop, its state, and blocks of elements.
Out: emissions on the device, and an array that is ready when the dispatch has finished.

    loop_runner            one loop and its executables; loop_state holds the arrays they overwrite
    loop_layout            which devices run it, which arrays hold its carry; replica_layout: one device
                           per replica; sharded_layout: a mesh (pipelines have their own)
    placement              where programs run, and how values get there
    device_program         what is compiled: a segment, rewritten; segments cuts a program
    executable             compiles it and dispatches it
    element_intake         the elements of a dispatch; sent_marks: what marks do while it runs
    fixed_loops            loops of fixed length, compiled beside the training
    dispatch_lengths       the lengths of a loop's pieces; their constants are in feeds/dispatch_table
    result_packing         small results in one array, so that one copy brings them to the host
    agreement              what processes compare before a dispatch

Rule: a dispatch waits for elements, never for results. Callers change state only through a dispatch or
`LoopRunner.replace`.
"""
