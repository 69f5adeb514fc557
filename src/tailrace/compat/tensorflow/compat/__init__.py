"""`tensorflow.compat`: the interface of TensorFlow 1."""
