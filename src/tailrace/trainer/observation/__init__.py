"""What becomes of the results of executions: history, records, run directories, bundles of bad ones."""
