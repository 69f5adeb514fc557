"""Where optimizer state and activations are kept: device, shards, host memory."""
