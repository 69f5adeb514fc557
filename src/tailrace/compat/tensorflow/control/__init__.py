"""Loops and branches over device values, written as Python statements.

In: the parts of a `for`, `while` or `if` of a function that AutoGraph has rewritten.
Out: a loop or a branch of the program.
Rule: `autograph.py` alone knows the package that rewrites functions; the others know names and values.
"""
