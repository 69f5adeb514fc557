"""Names and options of the original configuration."""
