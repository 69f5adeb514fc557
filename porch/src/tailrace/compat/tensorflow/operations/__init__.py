"""TensorFlow's operations, computed by Keras' operations and JAX.

In: arrays, variables, Keras' symbolic tensors, numbers. Out: arrays.
Rule: each file adds operations to the table of `table.py` by their names in TensorFlow; a call whose
arguments are tensors of TensorFlow itself (in `dataset.map`) is TensorFlow's.
"""
