"""One fit: its arguments (`fit_call`), its loop (`fit`), and the decisions in between.

In: an engine with the program of a dataset, a journal, callbacks and checkpoints. Out: executions, and
their results in the journal.

    fit_progress, step_counts   how far the fit is, and how many steps it has
    pace                        the number of steps per execution
    validation, interrupts      when to validate; Ctrl-C and SIGTERM
    progress_bar, notebook_view what the user sees meanwhile

Rule: only this package knows of epochs, validation and signals.
"""
