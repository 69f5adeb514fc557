"""Results of taps on the host: records, histories, histograms, printed tensors; the interface of sinks.

In: the emissions of an execution, and the taps they belong to (`records.take_records`).
Out: `Records` and `History` for users; a `Finished` execution for a sink.

    parts, record, records          emissions of an execution, put in order when they are read
    history, fingerprints           one value per step; 8 bytes per group of tensors and execution
    sinks                           what a training loop knows of storage; `runs` implements it
    exponents, float_formats        histograms of exponents, and what narrower formats would lose
    scores                          distances that outliers do not inflate, to find spikes
    print_tensor, array_text        tensors as text, while a program runs
    table, html_table, curves       tables and curves for terminals and notebooks
    filtered_outfeed                an outfeed that sends the names that pass a filter

Rules: nothing here writes files. Values are copied to the host here and nowhere before; from then on
they are NumPy arrays, and what several records share is read-only.
"""
