"""One device program: tracing, loops, steps, and how they are run."""
