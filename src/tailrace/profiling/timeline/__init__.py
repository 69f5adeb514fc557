"""`tr.trace`: a run as a timeline, in a file that Perfetto opens.

In: a closed `Recorder` and the operations of a profiler. Out: a file `trace-<number>.pftrace`.
Rule: only `perfetto_file.py` knows the file format.
"""
