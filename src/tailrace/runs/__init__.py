"""Runs on disk: written during training, read back, compared, exported and drawn.

In: finished executions, through the sink interface of `records` (`writer`).
Out: a directory of Zarr arrays and JSON; read back lazily by `reader` (`tr.open_run`).

    writer, reader, info     write, read and describe a run; the thread that writes: write_queue
    storage, tables          crash-safe files; rows and columns in them
    audit, bisect            whether every element was consumed once; where two runs first differ
    diff, export             the comparison of two runs; TensorBoard and pictures
    interventions, nonfinite_reports, compilations, profiles   small JSON files in a run

Rules. One process writes to a directory. Files are untrusted input: sizes are checked before memory is
allocated, and nothing in a file is executed.
"""
