"""What the strategy does to datasets, and the rules it has for them.

In: datasets used in the scope of an `IPUStrategy`. Out: infeeds, or a refusal with a reason.
Rule: classes of datasets are hooked once, in `dataset_iteration`; the hook asks which scope is open.
"""
