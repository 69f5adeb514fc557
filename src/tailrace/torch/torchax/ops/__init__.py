"""ATen operators that torchax lacks or gets wrong."""
