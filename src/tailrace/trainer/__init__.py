"""Training with optax: the trainer, its history and callbacks."""
