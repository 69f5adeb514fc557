"""The public names of the originals, and what became of each.

In: a name that a program uses. Out: its replacement, or an error with a specific message.
Rule: every public name of the originals is in `lists/*.txt`; modules of `compat` end with
`missing_from(__name__)`.
"""
