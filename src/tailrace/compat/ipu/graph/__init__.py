"""Variables, gradients and updates of TensorFlow-style programs."""
