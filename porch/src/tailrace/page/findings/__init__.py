"""What a run shows, in sentences: the one place that judges, for terminal, report and page.

In: a run that is followed. Out: `Finding`s, the worst first (`findings.findings`).
Rule: one file for one kind of finding. Terminal, report and page show these and judge nothing
themselves.
"""
