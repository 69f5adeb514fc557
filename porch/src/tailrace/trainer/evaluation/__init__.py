"""Running a function over all rows of a dataset: `evaluate`, `predict`, and how values become one."""
