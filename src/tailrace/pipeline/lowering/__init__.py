"""From stages and a plan to work for each device."""
