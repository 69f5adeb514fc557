"""Findings about a run, as sentences, for terminal, report and page.

In: a followed run. Out: `Finding`s, worst first (`findings.findings`).
Rule: one file per kind of finding. Terminal, report and page show these and draw no conclusions
themselves.
"""
