"""The names of the originals: which there were, and what became of each."""
