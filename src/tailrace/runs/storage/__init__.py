"""Files that survive a crash: atomic, durable, locked."""
