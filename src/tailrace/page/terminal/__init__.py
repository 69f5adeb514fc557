"""A run in the terminal.

In: a run. Out: lines of text, once (`show`) or repeatedly (`watch`).
Rule: findings come from `page.findings`; this package only does the layout.
"""
