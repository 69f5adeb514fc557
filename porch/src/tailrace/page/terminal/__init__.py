"""A run in the terminal.

In: a run. Out: lines of text, once (`show`) or again and again (`watch`).
Rule: findings come from `page.findings`; only layout is decided here.
"""
