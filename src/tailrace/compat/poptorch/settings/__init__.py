"""The parts of `poptorch.Options`: groups, locations, execution strategies, option files.

In: setters' arguments, and files of options. Out: values that `options` translates for
`tt.ModelOptions`.
Rule: a value is checked when it is set. A file is parsed, never executed: one known setter a line, with
literal arguments.
"""
