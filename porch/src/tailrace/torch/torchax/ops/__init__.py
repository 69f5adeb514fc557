"""ATen operators that torchax lacks or gets wrong.

In: tensors of a traced forward pass. Out: the same kind of tensors.
Rule: one file for one family of operators. `table` replaces PyTorch's functions; lowerings of
operations below them are registered in `torch/torchax/environment.py`.
"""
