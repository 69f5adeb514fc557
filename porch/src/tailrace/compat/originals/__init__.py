"""The names of the originals: which there were, and what became of each.

In: a name that a program asks for. Out: the thing, or an error with a sentence of its own.
Rule: every public name of the originals is in `lists/*.txt`; modules of `compat` end with
`missing_from(__name__)`.
"""
