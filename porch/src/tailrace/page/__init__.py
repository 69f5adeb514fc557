"""A run to look at: findings, in the terminal, as a report, as a page in the browser.

In: run directories, also while they grow (`followed`).
Out: the same facts in the terminal, as one HTML file, and as a live page.

    curves, layers, tensors, cells, summary   what can be shown, cut to what a screen holds
    findings                                  what is worth saying
    terminal, report, server, static          where it is shown

Rule: reads runs through `runs` and never writes them. It does not see the trainer.
"""
