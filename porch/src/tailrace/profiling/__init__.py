"""Where the time of a run went: a timeline of it, and a profile of its programs by scope.

Rule: it reads compiled programs and what the profiler of JAX saw; it runs nothing itself.
"""
