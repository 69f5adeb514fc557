"""Everything that relies on undocumented parts of torch and torchax.

In: PyTorch functions called on traced tensors. Out: JAX operations with PyTorch's results.
Rule: private parts of torch or torchax are used only here, or named in `torch/torch_internals.py`.
`versions` lists the supported combinations.
"""
