"""How a call runs on the device."""
