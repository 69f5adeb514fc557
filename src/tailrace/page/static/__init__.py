"""Files that a browser reads: the page and its style, and uPlot (MIT, see uplot/LICENSE)."""
