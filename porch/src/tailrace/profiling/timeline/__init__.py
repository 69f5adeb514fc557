"""`tr.trace`: a run as a timeline, in a file that Perfetto opens.

Rule: only `perfetto_file.py` knows the format of the file.
"""
