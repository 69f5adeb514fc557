"""What decides the order of a pass over data, besides its code, and is put back when a fit resumes.

random_sources   generators of random numbers: global ones, and those of the data
loader_state     these and the counters of a loader, by name
"""
