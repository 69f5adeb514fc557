"""A report of a run: one HTML file that needs nothing else.

In: a run. Out: one HTML file with its charts inside; it loads nothing from a network.
Rule: text from a run is escaped; a section without data is left out.
"""
