"""A program by scope: time, operations, bytes and memory, in the names of the catalogue.

Rule: a `Profile` is plain data; it is made in `measured.py` and can be read from JSON.
"""
