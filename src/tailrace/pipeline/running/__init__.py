"""Running a pipelined step as one device program."""
