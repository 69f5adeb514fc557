"""Runs on disk: written while training goes on, read back, compared, exported and drawn.

In: finished executions, through the sink interface of `records` (`writer`).
Out: a directory of Zarr arrays and JSON; read back lazily by `reader` (`tr.open_run`).

    writer, reader, info     a run written, read, described
    storage, tables          files that survive a crash; rows and columns in them
    diff, export             two runs compared; TensorBoard and pictures

Rule: one process writes to a directory. What is read is not trusted: sizes are checked first.
"""
