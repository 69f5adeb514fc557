"""Batches of Keras' data adapters, on their way to the device.

In: what Keras' data adapters yield. Out: blocks for dispatches, by form of batch.
Rule: a `HandedFeed` names the form and blocks go to `engine.dispatch`. Arrays that fit are kept on
the device (`resident_arrays`), and only row numbers travel.
"""
