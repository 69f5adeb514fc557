"""Batches of Keras' data adapters, and their transfer to the device.

In: batches of Keras' data adapters. Out: blocks for dispatches, by shape of batch.
Rule: a `HandedFeed` describes the batches, and blocks go to `engine.dispatch`. Arrays that fit are
kept on the device (`resident_arrays`), and only row indices are transferred.
"""
