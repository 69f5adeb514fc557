"""One fit: its arguments (`fit_call`), its loop (`fit`), and what decides when something happens.

In comes an engine on the program of a dataset, a journal, callbacks and checkpoints; out go executions,
and their results to the journal. Only this room knows of epochs, validation and signals.
"""
