"""Stand-ins for the originals' modules that add nothing: the oracle of the runner.

A program whose imports lead here trains on one device with PyTorch itself, or with TensorFlow and its
Keras. Batches of one weight update are the same; devices, stages and memory options have no effect.
Nothing of Tailrace takes part.
"""
