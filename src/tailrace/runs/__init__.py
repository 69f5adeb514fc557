"""Runs on disk: written while training goes on, read back, compared, exported and drawn."""
