"""Names for every tensor of a traced program, and the rewrite that turns a tap into an output.

In: a traced program with marks (`jaxprs`), and taps: requests to observe tensors.
Out: a catalogue of its tensors; and the program emitted again, with the selected tensors as outputs.

    naming, probe            names from scopes; marks on activations before differentiation
    activation_listing       the activations found while a step is traced
    catalogue, tap, wanted   the tensors there are, the requests, and the values that must leave
    rewrite                  emits the program again; frame holds the inputs and emissions of each part
    resolver                 what our own equations become: dequeues, keys, reductions over replicas
    loop_passes              iterations of a loop; counted_loop, while_passes: of one of other length
    reductions, bit_digests  statistics, norms, histograms and digests, computed on the device;
                             whole_reductions: those of sharded tensors

Rules. Every program that runs is emitted by `rewrite`, those of pipelines too. This package keeps no
records and writes no files: `records` and `runs` do.
"""
