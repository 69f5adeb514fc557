"""Growing columns of records on disk.

In: the parts of executions. Out: rows in growing columns; and records read from them.
Rule: rows count once the root's attributes say so: `runs.writer` writes those last. `stored` checks
what a file declares before it takes memory for it.
"""
