"""From a `torch.nn.Module` to a JAX function."""
