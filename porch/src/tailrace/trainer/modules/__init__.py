"""Modules of other libraries in the place of parameters: Flax NNX, Flax Linen, Equinox."""
