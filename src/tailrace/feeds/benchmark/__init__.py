"""How fast a dataset delivers, and whether the data or the device is the bottleneck."""
