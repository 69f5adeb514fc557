"""Views of a run: findings, in the terminal, as a report, as a live web page.

In: run directories, also while they are written (`followed`).
Out: the same facts in the terminal, as one HTML file, and as a live page.

    curves, layers, tensors, cells, summary   data to show, reduced to the size of a screen
    comparison                                two runs, or two profiles, side by side
    findings                                  conclusions, as sentences
    terminal, report, server, static          the views

Rule: it reads runs through `runs` and never writes them. It does not import the trainer.
"""
