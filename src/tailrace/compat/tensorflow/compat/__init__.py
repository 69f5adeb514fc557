"""`tensorflow.compat`: the interface of TensorFlow 1.

In and out: names. Rule: nothing but `v1` is here, and that collects names of `tensorflow/v1`.
"""
