"""A program by scope: time, operations, bytes and memory, under the names of the catalogue.

In: operations that ran, and the program they belong to. Out: a `Profile`, as text, HTML, SVG and JSON.
Rule: a `Profile` is plain data; only `measured.py` makes one, and it can be read from JSON.
"""
