"""Running a traced program: dispatch lengths, executables, results."""
