"""What differs between two runs, or two functions."""
