"""`tt.training_model` and `tt.inference_model`."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import torch

from tailrace.errors import OptionError
from tailrace.torch.calls.options import ModelOptions
from tailrace.torch.models.inference import InferenceModel
from tailrace.torch.models.training import TrainingModel
from tailrace.torch.models.ways_in import LossChoice
from tailrace.trainer.checkpoints.checkpoint import Checkpoint


def training_model(
    module: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    loss: LossChoice = None,
    scheduler: Any = None,
    max_grad_norm: float | None = None,
    checkpoint: Checkpoint | str | os.PathLike[str] | None = None,
    **options: Any,
) -> TrainingModel:
    """Wrap a module for training on the device.

    A call takes the arguments of the module's `forward`, with the rows of all microbatches of the call
    in dim 0, trains `device_iterations` steps and returns the results of `forward`. The loss is the
    result of a PyTorch loss function, or of `tt.identity_loss`, in `forward`; otherwise `.loss` or
    `["loss"]` of what it returns, the only scalar with a gradient, or the one that depends on all.

    Args:
        module: the module; its forward computes the loss.
        optimizer: from `torch.optim` or `tt.optim`; None: SGD, lr 0.01.
        loss: which value that forward returns is trained: a name ("total", "losses.main"), an index, or
            a function of the output. None: see above.
        scheduler: a `torch.optim.lr_scheduler` of that optimizer, or a list of them: advanced once a
            step, inside calls. A schedule by epochs is stepped by your loop instead.
        max_grad_norm: the norm of all gradients is scaled down to it before the update, as
            `torch.nn.utils.clip_grad_norm_` does.
        checkpoint: a directory, or a `tr.Checkpoint`: the training saves itself between calls, and
            `model.resume()` goes on from there.
        **options: see `tt.ModelOptions`: device_iterations, accumulation, replicas, output_mode, ...

    Raises:
        OptionError: there is no such option, its value is of the wrong kind, or the optimizer
            holds a parameter of another module.
        UsageError: an optimizer of this class has no update on the device.
        ProgramError: at the first call: `forward` has no loss, or an operation that cannot run
            on the device.

    Example:
        >>> import torch
        >>> import tailrace.torch as tt
        >>> class Fit(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.linear = torch.nn.Linear(1, 1)
        ...     def forward(self, x, y):
        ...         out = self.linear(x)
        ...         return out, torch.nn.functional.mse_loss(out, y)
        >>> module = Fit()
        >>> model = tt.training_model(module, torch.optim.SGD(module.parameters(), lr=0.5),
        ...                        device_iterations=100)
        >>> x = torch.linspace(0, 1, 800)[torch.randperm(800)].reshape(800, 1)
        >>> out, loss = model(x, 3 * x + 1)
        >>> bool(loss < 0.1), out.shape
        (True, torch.Size([8, 1]))
    """
    return TrainingModel(
        module,
        optimizer,
        _options(options),
        loss=loss,
        scheduler=scheduler,
        max_grad_norm=max_grad_norm,
        checkpoint=checkpoint,
    )


def inference_model(module: torch.nn.Module, **options: Any) -> InferenceModel:
    """Wrap a module for running on the device.

    A call takes the arguments of the module's `forward` and returns its results, for all
    `device_iterations` batches in dim 0. If the module is also wrapped for training, each call uses
    the latest weights.

    Args:
        module: the module, in the mode to run it in (`eval()` or not).
        **options: see `tt.ModelOptions`: device_iterations, replicas, output_mode, observe, ...

    Raises:
        OptionError: there is no such option, or its value is of the wrong kind.
        ProgramError: at the first call: an operation of `forward` cannot run on the device.

    Example:
        >>> import torch
        >>> import tailrace.torch as tt
        >>> model = tt.inference_model(torch.nn.Linear(2, 3).eval(), device_iterations=4)
        >>> model(torch.ones(20, 2)).shape
        torch.Size([20, 3])
    """
    return InferenceModel(module, _options(options))


def _options(given: dict[str, Any]) -> ModelOptions:
    known = {field.name for field in dataclasses.fields(ModelOptions) if field.init}
    wrong = [name for name in given if name not in known]
    if wrong:
        raise OptionError(
            f"There is no option {wrong[0]!r}. Options are: {', '.join(sorted(known))}."
        )
    return ModelOptions(**given)
