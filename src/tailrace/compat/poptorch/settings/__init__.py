"""The parts of `poptorch.Options`: groups, locations, execution strategies, option files."""
