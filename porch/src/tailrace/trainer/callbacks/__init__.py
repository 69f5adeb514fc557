"""What runs on the host while training goes on: `tr.Callback`, and callbacks that are ready made.

A callback gets values that have left the device. `trainer.params` and `trainer.step` in it belong to
the same step as the values.
"""

from tailrace.trainer.callbacks.callback import Callback
from tailrace.trainer.callbacks.early_stopping import EarlyStopping
from tailrace.trainer.callbacks.loggers import CSVLogger, Metrics, TensorBoard

__all__ = ["CSVLogger", "Callback", "EarlyStopping", "Metrics", "TensorBoard"]
