"""From a Python function to a traced program that is checked and ready to run."""
