"""Running a function over all rows of a dataset: `evaluate` and `predict`.

In: a function, parameters, and a dataset. Out: one value per name (`combining` has the rules), or the
results of all rows. Rule: every row counts exactly once, also those of a smaller last batch.
"""
