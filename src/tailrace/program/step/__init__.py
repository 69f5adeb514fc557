"""One optimizer update: gradients, accumulation, reduction over replicas."""
