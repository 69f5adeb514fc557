"""Optimizers for models that train on the device: PyTorch's, with a few options more.

`torch.optim.SGD`, `Adam`, `AdamW` and `RMSprop` are accepted as they are; these add loss scaling,
dtypes of accumulators and state, clipping by the global norm, and LAMB.

In: a PyTorch optimizer with its groups and state. Out: `init` and `apply`, as the engine calls them,
and state written back to the PyTorch object (`binding`).
Rule: `rules` and `further_rules` have PyTorch's arithmetic; numbers are inputs of the program, never
constants.
"""

from tailrace.torch.optim.classes import LAMB as LAMB
from tailrace.torch.optim.classes import SGD as SGD
from tailrace.torch.optim.classes import Adam as Adam
from tailrace.torch.optim.classes import AdamW as AdamW
from tailrace.torch.optim.classes import RMSprop as RMSprop
