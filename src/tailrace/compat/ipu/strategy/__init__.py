"""What the strategy does to datasets, and the rules it has for them."""
