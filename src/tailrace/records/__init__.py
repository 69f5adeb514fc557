"""What taps deliver, on the host: records, histograms, printed tensors, and where they are sent."""
