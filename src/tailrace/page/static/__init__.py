"""Files that a browser reads: the page and its style, and uPlot (MIT, see uplot/LICENSE).

In: JSON from `page.server`. Out: what the browser shows.
Rule: plain files, served unchanged; there is no build step, and nothing is loaded from the network.
"""
