"""How a call runs on the device.

In: a traced forward pass, an optimizer, and blocks of one call.
Out: what the taps of that call emitted, from which outputs are made.
Rule: `train` drives an `Engine`; `infer` drives a `LoopRunner`. `portions` overlaps copies and
steps, for both.
"""
