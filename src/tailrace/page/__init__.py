"""A run to look at: findings, in the terminal, as a report, as a page in the browser."""
