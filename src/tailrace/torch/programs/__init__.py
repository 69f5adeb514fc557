"""The device programs of a call.

In: a traced forward pass, an optimizer, and blocks of one call.
Out: the emissions of that call's taps, from which its outputs are made.
Rule: `train` drives an `Engine`; `infer` drives a `LoopRunner`. `portions` overlaps copies and
steps, for both.
"""
