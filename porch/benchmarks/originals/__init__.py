"""The originals' own programs, run with their imports changed and nothing else.

In: a checkout of Graphcore's public examples, which is not part of this repository.
Out: a table of the programs: which run, with how many lines changed, and why the others do not.
Rule: programs are changed by the one table in `imports`; data that they would download is supplied in
`data`; neither knows of a single program.
"""
