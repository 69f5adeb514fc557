"""What a run shows, in sentences: the one place that judges, for terminal, report and page."""
