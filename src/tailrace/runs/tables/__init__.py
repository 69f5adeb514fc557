"""Growing columns of records on disk."""
