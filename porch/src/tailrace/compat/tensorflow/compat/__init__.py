"""`tensorflow.compat`: the words of TensorFlow 1."""
