"""Plans as text and as SVG.

In: a plan. Out: a grid of characters (`grid`), or an SVG: `panel` has its measures, `painting` its
colours and shapes, `canvas` its elements, and `figure` puts them together.

Rule: reads the plan's ticks and computes nothing about it. No JAX, no drawing library. What a
picture leaves out (`grid.visible`) is marked in it.
"""
