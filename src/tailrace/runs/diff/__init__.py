"""The first difference between two runs, or two functions.

In: two runs, or two functions and their arguments. Out: the first tensor that differs, and
by how much (`run_diff`, `tr.diff`).
Rule: runs are read only through `reader`, and functions are observed only by `tr.observe`.
"""
