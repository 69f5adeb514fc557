"""Names and options of the original configuration.

In: assignments to an `IPUConfig`. Out: typed, checked options.
Rule: an option is declared once, in `options`, with types, default and meaning.
"""
