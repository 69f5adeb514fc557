"""One call of a model: its inputs, its feed, its outputs."""
