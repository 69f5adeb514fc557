"""Host and device: the infeed and the outfeed."""
