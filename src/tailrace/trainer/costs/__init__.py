"""What training takes: memory and time.

In: an engine, or the options and shapes it is made from.
Out: a `MemoryPlan` before anything runs; explanations, reports and profiles afterwards.

    memory_plan        where state and activations are held; `program/memory` carries it out
    memory_shortage    the error if a device runs out of memory: what takes it, what would help
    explain, explanation   what one execution needs and computes, as XLA says
    profiled, measuring    time by scope, on copies of the state

Rule: measuring leaves a trainer as it was: state, position in the dataset and counters.
"""
