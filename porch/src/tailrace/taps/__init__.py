"""Names for every tensor of a traced program, and the rewrite that makes a tap an output.

In: a traced program with marks, and taps.
Out: a catalogue of its tensors; and the program emitted again, with what taps select as outputs.

    naming, probe            names from scopes; marks on activations before differentiation
    catalogue, tap, wanted   what there is, what is asked for, what must leave the program
    rewrite, loop_passes     the program again; frame has what goes in and out of each part
    reductions               what is computed of a tensor on the device

Rule: programs that run are emitted by `rewrite`, those of pipelines too. No history, no files here.
"""
