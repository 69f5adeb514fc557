"""What happens when: spans and counters, kept while a trace is open and free of cost otherwise.

Rule: anything may open a span; nothing here knows what is done with it.
"""
