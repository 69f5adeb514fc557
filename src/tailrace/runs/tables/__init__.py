"""Growing columns of records on disk.

In: the parts of executions. Out: rows in growing columns; and records read from them.
Rule: rows count once the root's attributes include them: `runs.writer` writes those last. `stored`
checks a file's declared sizes before it allocates memory.
"""
