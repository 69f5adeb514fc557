"""Compiling a lowered program: once for equal ones, with the kernels of before, and not unnoticed.

In: a lowered program.
Out: its XLA executable.

    compiled_programs      equal programs are compiled once per process
    kernel_choices         what XLA chose by timing, kept with checkpoints on a GPU
    compilations           what was compiled, why, and how long it took

Rule: nothing here knows what a program computes.
"""
