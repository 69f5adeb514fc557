"""Runs as TensorBoard events and pictures.

In: an open run. Out: TensorBoard event files, histograms and heat maps.
Rule: what draws or writes events (matplotlib, tensorboardX) is imported when it is called for.
"""
