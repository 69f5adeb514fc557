"""The values that `set_pipelining_options` and similar setters accept.

In: the setters of a model (`setters`). Out: `Settings`, which programs read.
Rule: a setting is checked when it is set. Programs read `Settings` and never a setter's arguments.
"""
