"""Several processes as one program: joining, launching, leaving."""
