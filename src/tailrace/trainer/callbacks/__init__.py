"""Host code that runs during training: `tr.Callback`, and ready-made callbacks.

In: results of executions, on the host. Out: whatever a callback does with them.
Rule: inside a callback, `trainer.params` and `trainer.step` belong to the same step as the values.
"""

from tailrace.trainer.callbacks.callback import Callback
from tailrace.trainer.callbacks.early_stopping import EarlyStopping
from tailrace.trainer.callbacks.loggers import CSVLogger, Metrics, TensorBoard

__all__ = ["CSVLogger", "Callback", "EarlyStopping", "Metrics", "TensorBoard"]
