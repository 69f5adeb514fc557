"""What was observed, on the host: records, tables, printing."""
