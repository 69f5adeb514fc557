"""The optimizer classes: PyTorch's, with additional options for training on a device."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, SupportsFloat

import torch

from tailrace.base.trees import Tree
from tailrace.errors import OptionError
from tailrace.torch.errors import UsageError

_NORM_RULE = "max_grad_norm is the most that the norm of all gradients may be, and"


def _positive(rule: str, name: str, value: SupportsFloat | str | None, default: float) -> float:
    """A number greater than 0, or the default for None."""
    if value is None:
        return default
    try:
        # NaN for what is no number: the comparison below refuses it with the rest.
        found = math.nan if isinstance(value, bool | str) else float(value)
    except (TypeError, ValueError):
        found = math.nan
    if not found > 0:
        raise OptionError(f"{rule} is greater than 0. Received: {name}={value!r}.")
    return found


def checked_norm(value: float | None, optimizer: torch.optim.Optimizer) -> float | None:
    """The value of `max_grad_norm=` of a training model."""
    if value is None:
        return None
    own = getattr(optimizer, "max_grad_norm", math.inf)
    if math.isfinite(own):
        raise OptionError(
            f"max_grad_norm is given to the model or to its optimizer of tt.optim. Received: "
            f"max_grad_norm={value!r} beside {own!r} of {type(optimizer).__name__}. Leave one out."
        )
    return _positive(_NORM_RULE, "max_grad_norm", value, math.inf)


class _OnDevice:
    """The additional options of all of them: loss scaling and dtypes."""

    loss_scaling: float
    accum_type: torch.dtype | None
    state_types: dict[str, torch.dtype | None]
    max_grad_norm: float

    def _take_options(
        self,
        loss_scaling: float | None,
        accum_type: torch.dtype | None,
        max_grad_norm: float | None = None,
        **state_types: torch.dtype | None,
    ) -> None:
        self.loss_scaling = _positive(
            "loss_scaling multiplies the loss and", "loss_scaling", loss_scaling, 1.0
        )
        self.max_grad_norm = _positive(_NORM_RULE, "max_grad_norm", max_grad_norm, math.inf)
        for dtype in (accum_type, *state_types.values()):
            if dtype not in (None, torch.float16, torch.float32, torch.bfloat16):
                raise UsageError(
                    f"Accumulation types must be either torch.float32 or torch.float16 (or "
                    f"torch.bfloat16). Received: {dtype}."
                )
        self.accum_type = accum_type
        self.state_types = state_types


class SGD(_OnDevice, torch.optim.SGD):
    """`torch.optim.SGD` for training on the device.

    Args:
        params: as in PyTorch, groups included.
        lr: as in PyTorch.
        momentum: as in PyTorch.
        dampening: as in PyTorch.
        weight_decay: as in PyTorch.
        nesterov: as in PyTorch.
        loss_scaling: a factor for the loss before differentiation; gradients are divided by it.
        velocity_scaling: accepted; has an effect only with combined accumulators.
        use_combined_accum: accepted; accumulator and momentum are separate here.
        accum_type: dtype of the gradient accumulators.
        velocity_accum_type: dtype of the momentum.
        max_grad_norm: the largest global norm of gradients, which are scaled down to it.
        **options: PyTorch's other options.

    Raises:
        OptionError: `loss_scaling` or `max_grad_norm` is not greater than 0.
        UsageError: a dtype is not one of float32, float16 and bfloat16.

    >>> import torch
    >>> import tailrace.torch as tt
    >>> layer = torch.nn.Linear(2, 1)
    >>> tt.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9).loss_scaling
    1.0
    """

    def __init__(
        self,
        params: Tree,
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        loss_scaling: float | None = None,
        velocity_scaling: float | None = None,
        use_combined_accum: bool = False,
        accum_type: torch.dtype | None = None,
        velocity_accum_type: torch.dtype | None = None,
        max_grad_norm: float | None = None,
        **options: Any,
    ) -> None:
        super().__init__(params, lr, momentum, dampening, weight_decay, nesterov, **options)
        self._take_options(
            loss_scaling, accum_type, max_grad_norm, momentum_buffer=velocity_accum_type
        )
        self.use_combined_accum, self.velocity_scaling = use_combined_accum, velocity_scaling


class _AdamOptions(_OnDevice):
    bias_correction: bool

    def _take_adam(
        self,
        loss_scaling: float | None,
        bias_correction: bool,
        accum_type: torch.dtype | None,
        first: torch.dtype | None,
        second: torch.dtype | None,
        max_grad_norm: float | None,
    ) -> None:
        self._take_options(
            loss_scaling, accum_type, max_grad_norm, exp_avg=first, exp_avg_sq=second
        )
        self.bias_correction = bias_correction


class Adam(_AdamOptions, torch.optim.Adam):
    """`torch.optim.Adam` for training on the device.

    Args:
        params: as in PyTorch, groups included.
        lr: as in PyTorch.
        betas: as in PyTorch.
        eps: as in PyTorch.
        weight_decay: as in PyTorch.
        amsgrad: as in PyTorch; `poptorch.optim` refuses it, as the original does.
        loss_scaling: a factor for the loss before differentiation; gradients are divided by it.
        accum_type: dtype of the gradient accumulators.
        first_order_momentum_accum_type: dtype of the first moment.
        second_order_momentum_accum_type: dtype of the second moment.
        max_grad_norm: the largest global norm of gradients, which are scaled down to it.
        **options: PyTorch's other options.

    Raises:
        OptionError: `loss_scaling` or `max_grad_norm` is not greater than 0.
        UsageError: a dtype is not one of float32, float16 and bfloat16.

    >>> import torch
    >>> import tailrace.torch as tt
    >>> layer = torch.nn.Linear(2, 1)
    >>> tt.optim.Adam(layer.parameters(), max_grad_norm=1.0).max_grad_norm
    1.0
    """

    def __init__(
        self,
        params: Tree,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        loss_scaling: float | None = None,
        accum_type: torch.dtype | None = None,
        first_order_momentum_accum_type: torch.dtype | None = None,
        second_order_momentum_accum_type: torch.dtype | None = None,
        max_grad_norm: float | None = None,
        **options: Any,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, **options)
        self._take_adam(
            loss_scaling,
            True,
            accum_type,
            first_order_momentum_accum_type,
            second_order_momentum_accum_type,
            max_grad_norm,
        )


class AdamW(_AdamOptions, torch.optim.AdamW):
    """`torch.optim.AdamW` for training on the device.

    Args:
        params: as in PyTorch, groups included.
        lr: as in PyTorch.
        betas: as in PyTorch.
        eps: as in PyTorch.
        weight_decay: as in PyTorch.
        amsgrad: as in PyTorch; `poptorch.optim` refuses it, as the original does.
        loss_scaling: a factor for the loss before differentiation; gradients are divided by it.
        bias_correction: False omits the corrections of the two moments.
        accum_type: dtype of the gradient accumulators.
        first_order_momentum_accum_type: dtype of the first moment.
        second_order_momentum_accum_type: dtype of the second moment.
        max_grad_norm: the largest global norm of gradients, which are scaled down to it.
        **options: PyTorch's other options.

    Raises:
        OptionError: `loss_scaling` or `max_grad_norm` is not greater than 0.
        UsageError: a dtype is not one of float32, float16 and bfloat16.

    >>> import torch
    >>> import tailrace.torch as tt
    >>> layer = torch.nn.Linear(2, 1)
    >>> tt.optim.AdamW(layer.parameters(), bias_correction=False).bias_correction
    False
    """

    def __init__(
        self,
        params: Tree,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        loss_scaling: float | None = None,
        bias_correction: bool = True,
        accum_type: torch.dtype | None = None,
        first_order_momentum_accum_type: torch.dtype | None = None,
        second_order_momentum_accum_type: torch.dtype | None = None,
        max_grad_norm: float | None = None,
        **options: Any,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, **options)
        self._take_adam(
            loss_scaling,
            bias_correction,
            accum_type,
            first_order_momentum_accum_type,
            second_order_momentum_accum_type,
            max_grad_norm,
        )


class RMSprop(_OnDevice, torch.optim.RMSprop):
    """`torch.optim.RMSprop` for training on the device.

    Args:
        params: as in PyTorch, groups included.
        lr: as in PyTorch.
        alpha: as in PyTorch.
        eps: as in PyTorch.
        weight_decay: as in PyTorch.
        momentum: as in PyTorch.
        centered: as in PyTorch; in all groups or in none.
        loss_scaling: a factor for the loss before differentiation; gradients are divided by it.
        accum_type: dtype of the gradient accumulators.
        first_order_momentum_accum_type: dtype of the mean gradient and the momentum.
        second_order_momentum_accum_type: dtype of the mean square.
        use_tf_variant: start the mean square at 1, with eps inside the root and the learning rate
            inside the momentum.
        **options: PyTorch's other options.

    Raises:
        OptionError: `loss_scaling` is not greater than 0, or groups differ in `centered`.
        UsageError: a dtype is not one of float32, float16 and bfloat16.

    >>> import torch
    >>> import tailrace.torch as tt
    >>> layer = torch.nn.Linear(2, 1)
    >>> tt.optim.RMSprop(layer.parameters(), use_tf_variant=True).use_tf_variant
    True
    """

    use_tf_variant: bool

    def __init__(
        self,
        params: Tree,
        lr: float = 1e-2,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        momentum: float = 0.0,
        centered: bool = False,
        *,
        loss_scaling: float | None = None,
        accum_type: torch.dtype | None = None,
        first_order_momentum_accum_type: torch.dtype | None = None,
        second_order_momentum_accum_type: torch.dtype | None = None,
        use_tf_variant: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(params, lr, alpha, eps, weight_decay, momentum, centered, **options)
        self._take_options(
            loss_scaling,
            accum_type,
            square_avg=second_order_momentum_accum_type,
            grad_avg=first_order_momentum_accum_type,
            momentum_buffer=first_order_momentum_accum_type,
        )
        self.use_tf_variant = use_tf_variant
        if len({group["centered"] for group in self.param_groups}) > 1:
            raise OptionError(
                "RMSprop is centered in all parameter groups or in none. Received: both. Use two "
                "models, or one value."
            )


class LAMB(_OnDevice, torch.optim.Optimizer):
    """Adam, with each tensor's update scaled to the norm of the tensor (LAMB).

    Args:
        params: as in PyTorch, groups included.
        lr: the learning rate.
        betas: the decay rates of the two moments.
        eps: added to the root of the second moment.
        weight_decay: decoupled, inside the scaled update.
        bias_correction: whether the moments are corrected for their start at 0.
        loss_scaling: a factor for the loss before differentiation; gradients are divided by it.
        max_weight_norm: the upper limit of a tensor's norm; None: 65500.
        accum_type: dtype of the gradient accumulators.
        first_order_momentum_accum_type: dtype of the first moment.
        second_order_momentum_accum_type: dtype of the second moment.

    Raises:
        OptionError: a number is out of its range.
        UsageError: a dtype is not one of float32, float16 and bfloat16.

    >>> import torch
    >>> import tailrace.torch as tt
    >>> layer = torch.nn.Linear(2, 1)
    >>> tt.optim.LAMB(layer.parameters(), lr=0.1).loss_scaling
    1.0
    """

    bias_correction: bool

    def __init__(
        self,
        params: Tree,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        bias_correction: bool = True,
        loss_scaling: float | None = None,
        max_weight_norm: float | None = None,
        accum_type: torch.dtype | None = None,
        first_order_momentum_accum_type: torch.dtype | None = None,
        second_order_momentum_accum_type: torch.dtype | None = None,
    ) -> None:
        if lr < 0 or eps < 0 or weight_decay < 0 or not all(0 <= beta < 1 for beta in betas):
            raise OptionError(
                f"LAMB needs lr, eps, weight_decay >= 0 and betas in [0, 1). Received: lr={lr}, "
                f"eps={eps}, weight_decay={weight_decay}, betas={betas}."
            )
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            # The limit of the original: just below the largest float16.
            "max_weight_norm": 65500.0 if max_weight_norm is None else max_weight_norm,
        }
        super().__init__(params, defaults)
        self._take_options(
            loss_scaling,
            accum_type,
            exp_avg=first_order_momentum_accum_type,
            exp_avg_sq=second_order_momentum_accum_type,
        )
        self.bias_correction = bias_correction

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Refused: updates happen on the device."""
        raise UsageError(
            "LAMB updates weights on the device only: give it to tt.training_model(module, "
            "optimizer) and call the model."
        )
