"""Loops that users write by hand, and the state they reach."""
