"""Runs as TensorBoard events and pictures.

In: an open run. Out: TensorBoard event files, histograms and heat maps.
Rule: matplotlib and tensorboardX are optional, and imported only when they are used.
"""
