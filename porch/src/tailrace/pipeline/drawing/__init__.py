"""Plans as text and as SVG.

In: a plan. Out: a grid of characters (`grid`) or an SVG (`figure`).
Rule: reads the plan's ticks and computes nothing about it. No JAX, no drawing library.
"""
