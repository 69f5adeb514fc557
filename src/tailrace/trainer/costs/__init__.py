"""What training takes: memory planned, explained and run out of; time by scope."""
