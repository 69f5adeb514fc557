"""What we know of torch and torchax beyond their public interface.

In: PyTorch functions called on traced tensors. Out: JAX operations with PyTorch's results.
Rule: what is private in torch or torchax is used here or named in `torch/torch_internals.py`.
`versions` says which releases go together.
"""
