"""What differs between two runs, or two functions.

In: two runs, or two functions and their arguments. Out: the first tensor that differs, and
by how much (`run_diff`, `tr.diff`).
Rule: runs are read through `reader` and functions are observed by `tr.observe`: no other way in.
"""
