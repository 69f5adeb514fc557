"""A PyTorch optimizer as the optimizer of a training program.

Its state is on the device as {"hyper", "step", <slot>: {<parameter>: tensor}} and is copied to the
PyTorch object, under PyTorch's names, when weights are copied to the host.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from tailrace.base.array_like import TensorLike
from tailrace.base.messages import note_once
from tailrace.base.trees import Tree
from tailrace.errors import OptionError
from tailrace.program import in_program
from tailrace.torch.calls.arrays import array_of, dtype_on_device, tensor_of
from tailrace.torch.errors import UsageError
from tailrace.torch.optim.classes import LAMB
from tailrace.torch.optim.further_rules import NUMBERS
from tailrace.torch.optim.loss_scaling import FACTOR, next_factor
from tailrace.torch.optim.rules import GroupRule, Hypers, row_of

_KINDS: tuple[tuple[type, str], ...] = (
    (torch.optim.SGD, "sgd"),
    (torch.optim.AdamW, "adam"),
    (torch.optim.Adam, "adam"),
    (torch.optim.RMSprop, "rmsprop"),
    (LAMB, "lamb"),
    (torch.optim.Adadelta, "adadelta"),
    (torch.optim.Adagrad, "adagrad"),
    (torch.optim.Adamax, "adamax"),
    (torch.optim.ASGD, "asgd"),
    (torch.optim.NAdam, "nadam"),
    (torch.optim.RAdam, "radam"),
    (torch.optim.Rprop, "rprop"),
)


def has_stepped(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer has made steps, or was given the state of one that has.

    Adagrad has state from the beginning, and counts no step in it.
    """
    return any("step" not in held or held["step"] > 0 for held in optimizer.state.values())


def _is_known(kind: type) -> bool:
    return kind.__module__.startswith(("torch.optim", "tailrace."))


class DeviceOptimizer:
    """A PyTorch optimizer on the device.

    Args:
        optimizer: an instance of one of the supported classes.
        names: the name of each parameter of the module, by the id of the tensor.
        gradient_scale: a factor for gradients.
        scaled_gradients: whether observed gradients are those of the scaled loss.
        unused: parameters without a gradient, which do not change, as in PyTorch.
        before: the previous optimizer; a new one of the same class without state continues from its
            state.
        steps: the steps of a call, if its numbers may differ in each of them; 0: all steps of a call
            have the same.
        max_grad_norm: the largest global norm of gradients; None for that of the optimizer.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        names: Mapping[int, str],
        gradient_scale: float = 1,
        scaled_gradients: bool = False,
        unused: frozenset[str] = frozenset(),
        before: DeviceOptimizer | None = None,
        steps: int = 0,
        max_grad_norm: float | None = None,
    ) -> None:
        self._unused, self._steps_of_call, self._norm = unused, steps, max_grad_norm
        self.optimizer, self.gradient_scale = optimizer, gradient_scale
        self.scaled_gradients = scaled_gradients
        kind = next((name for one, name in _KINDS if isinstance(optimizer, one)), None)
        # By `isinstance`: users derive from PyTorch's classes to change defaults or hooks.
        if kind is None:
            raise UsageError(
                f"Unsupported optimizer type: updates run on the device, for torch.optim.SGD, Adam, "
                f"AdamW, RMSprop, Adadelta, Adagrad, Adamax, ASGD, NAdam, RAdam, Rprop and those of "
                f"tt.optim. Received: {type(optimizer).__name__}. Use one of these."
            )
        self.kind = kind
        if "step" in vars(type(optimizer)) and not _is_known(type(optimizer)):
            note_once(
                f"Updates run on the device by the rule of {kind!r}; the step method of "
                f"{type(optimizer).__name__} is not called."
            )
        self.tensors: dict[str, torch.Tensor] = {}
        self.groups = tuple(self._rule(group, names) for group in optimizer.param_groups)
        self.state_types = {
            slot: dtype_on_device(dtype)
            for slot, dtype in getattr(optimizer, "state_types", {}).items()
            if dtype is not None
        }
        # A new object has no state of its own yet: it continues from that of the old one, if that fits.
        goes_on = before is not None and before.kind == kind and not has_stepped(optimizer)
        self._source = before.optimizer.state if before and goes_on else optimizer.state
        self.late = self._late()
        self.listed = [param for group in optimizer.param_groups for param in group["params"]]
        self.scaled, self.automatic = self.loss_scaling != 1, False
        self.clipped = math.isfinite(self.max_grad_norm)

    def scale_automatically(self) -> None:
        """Adapt the loss scale to the gradients, starting from `loss_scaling`."""
        self.scaled = self.automatic = True

    @property
    def loss_scaling(self) -> float:
        """The initial loss scale."""
        return float(getattr(self.optimizer, "loss_scaling", 1.0))

    @property
    def max_grad_norm(self) -> float:
        """The norm that all gradients together are scaled down to."""
        own = getattr(self.optimizer, "max_grad_norm", math.inf)
        return float(own if self._norm is None else self._norm)

    @property
    def accum_type(self) -> Any:
        """The dtype of gradient accumulators; None for that of the parameter."""
        dtype = getattr(self.optimizer, "accum_type", None)
        return None if dtype is None else dtype_on_device(dtype)

    @property
    def key(self) -> Any:
        """Two optimizers with equal keys need the same program."""
        types = tuple(sorted((k, str(v)) for k, v in self.state_types.items()))
        # Whether there is a scale is part of the program; with one, its number is too: the loss is
        # multiplied by a constant.
        scaling = self.scaled and self.loss_scaling
        scale = (self.gradient_scale, str(self.accum_type), scaling, self.scaled_gradients)
        scale = (*scale, self.automatic)
        late = tuple(sorted(self.late.items()))
        return (self.groups, types, self.clipped, scale, late)

    def forms(self) -> Any:
        """The properties of parameters that the program depends on. Checked before every call."""
        return [(param.requires_grad, param.dtype) for param in self.listed]

    def choices(self) -> Any:
        """The properties of the optimizer that the program depends on."""
        groups = self.optimizer.param_groups
        held = list(zip(self.flags(), [list(map(id, g["params"])) for g in groups], strict=True))
        return (self.loss_scaling, math.isfinite(self.max_grad_norm), self.accum_type, held)

    def flags(self) -> list[frozenset[str]]:
        """The options of each group that decide which tensors exist."""
        return [self._flags(group) for group in self.optimizer.param_groups]

    def keeps_scale(self, param: TensorLike) -> bool:
        """Whether the gradient of a parameter stays scaled until the update.

        In 16 bits it must: dividing it earlier would undo the purpose of scaling.
        """
        return self.scaled_gradients or jnp.dtype(param.dtype).itemsize < 4

    def hypers(self) -> np.ndarray:
        """The current numbers of all groups, as the state has them: for each step, or for all."""
        numbers = self.numbers()
        steps = self._steps_of_call
        return np.broadcast_to(numbers, (steps, *numbers.shape)) if steps else numbers

    def numbers(self) -> np.ndarray:
        """The current numbers of all groups, [groups, numbers]."""
        scaling, norm = self.loss_scaling, self.max_grad_norm
        # float32, as on the device: before every call the bytes are compared with those sent last.
        return np.array(
            [row_of(group, self.kind, scaling, norm) for group in self.optimizer.param_groups],
            np.float32,
        )

    # -- in the program -------------------------------------------------------------------------

    def init(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """The initial state, from the PyTorch object if it has one."""
        state: dict[str, Any] = {"hyper": jnp.asarray(self.hypers()), "step": jnp.int32(0)}
        for rule in self.groups:
            for slot in rule.slots:
                filled = state.setdefault(slot, {})
                for name in rule.params:
                    filled[name] = self._first(rule, slot, name, params[name])
        # The largest count; `late` has what others are behind it.
        state["step"] = jnp.int32(max(map(self._steps, self.tensors), default=0))
        if self.automatic:
            state[FACTOR] = jnp.float32(getattr(self.optimizer, FACTOR, 1.0))
        return state

    def _steps(self, name: str) -> int:
        """The number of steps of a parameter; SGD has no count."""
        held = self._held(name)
        if "step" in held:
            return int(held["step"])
        # A momentum buffer is made in the first step: whether there was one is all that SGD knows.
        return int(any(value is not None for value in held.values()))

    def _late(self) -> dict[str, int]:
        """How many fewer steps than others a parameter has, because it was added or unfrozen later."""
        steps = {name: self._steps(name) for name in self.tensors}
        most = max(steps.values(), default=0)
        return {name: most - own for name, own in steps.items() if own != most}

    def _first(self, rule: GroupRule, slot: str, name: str, param: TensorLike) -> Any:
        dtype = jnp.float32 if slot in NUMBERS else self.state_types.get(slot, param.dtype)
        held = self._held(name).get(slot)
        if held is not None:
            return jnp.asarray(array_of(held), dtype)
        shape = () if slot in NUMBERS else param.shape
        return jnp.full(shape, rule.start(slot), dtype)

    def _held(self, name: str) -> Mapping[str, Any]:
        return self._source.get(self.tensors[name], {})

    def apply(self, grads: Tree, state: Tree, params: Tree) -> tuple[Any, Any]:
        """Parameters and state after one step."""
        step, hyper = state["step"] + 1, self._hyper(state)
        # A copy of the dicts: `state` belongs to the caller, whose trace still uses it.
        after = {slot: dict(v) if isinstance(v, dict) else v for slot, v in state.items()}
        updated = dict(params)
        # Only parameters in a group: others have no update, and would count in the global norm.
        wide = {n: grads[n].astype(jnp.float32) for rule in self.groups for n in rule.params}
        if self.gradient_scale != 1:
            wide = {name: grad * jnp.float32(self.gradient_scale) for name, grad in wide.items()}
        if self.scaled:
            scaling = Hypers(hyper[0], self.kind).loss_scaling
            if self.automatic:
                seen = {name: grads[name] for name in wide}
                after[FACTOR] = updated[FACTOR] = next_factor(seen, params[FACTOR], scaling)
                scaling = scaling * params[FACTOR]
            wide = {
                name: grad / scaling if self.keeps_scale(params[name]) else grad
                for name, grad in wide.items()
            }
        # After the scale is divided out, and over all groups, as `clip_grad_norm_` of all parameters
        # is.
        if self.clipped:
            norm = jnp.sqrt(sum(jnp.sum(grad * grad) for grad in wide.values()))
            most = Hypers(hyper[0], self.kind).max_grad_norm
            # The constant of `torch.nn.utils.clip_grad_norm_`.
            share = jnp.minimum(most / (norm + 1e-6), 1)
            wide = {name: grad * share for name, grad in wide.items()}
        for number, rule in enumerate(self.groups):
            numbers = Hypers(hyper[number], self.kind)
            for name in rule.params:
                param = params[name]
                slots = {slot: state[slot][name].astype(jnp.float32) for slot in rule.slots}
                # Bias corrections go by the parameter's own steps, as in PyTorch, where each has
                # its own count.
                own = step - self.late[name] if name in self.late else step
                with jax.named_scope(name):
                    new = rule.update(param.astype(jnp.float32), wide[name], slots, numbers, own)
                updated[name] = new.astype(param.dtype)
                for slot, value in slots.items():
                    after[slot][name] = value
        after["step"] = step
        return updated, after

    def _hyper(self, state: Mapping[str, Any]) -> Any:
        """The numbers of this step."""
        if self._steps_of_call == 0:
            return state["hyper"]
        # By the number of the step in the training, which a skipped step advances too: the row of step
        # s is s modulo the steps of a call.
        row = in_program.step() % self._steps_of_call
        return jax.lax.dynamic_index_in_dim(state["hyper"], row, keepdims=False)

    # -- on the host ----------------------------------------------------------------------------

    def take_over(self, state: Mapping[str, Any]) -> None:
        """Copy the state of the device to the PyTorch object."""
        step = int(np.asarray(state["step"]))
        if self.automatic:
            setattr(self.optimizer, FACTOR, float(np.asarray(state[FACTOR])))
        for rule in self.groups:
            for name in rule.params:
                own, tensor = step - self.late.get(name, 0), self.tensors[name]
                if own < 1:
                    continue  # PyTorch makes state in the first step
                found: dict[str, Any] = {
                    slot: tensor_of(state[slot][name]).to(tensor.device) for slot in rule.slots
                }
                if self.kind != "sgd":
                    found["step"] = torch.tensor(float(own))
                if found:
                    self.optimizer.state[tensor].update(found)

    def _rule(self, group: Mapping[str, Any], names: Mapping[int, str]) -> GroupRule:
        for param in group["params"]:
            if id(param) not in names:
                raise OptionError(
                    f"The optimizer of a model updates that model's parameters. It holds another "
                    f"one, of shape {list(param.shape)}. Make it from module.parameters(), after the "
                    f"module is complete."
                )
        trained = [
            param
            for param in group["params"]
            if param.requires_grad and names[id(param)] not in self._unused
        ]
        self.tensors.update({names[id(param)]: param for param in trained})
        params = tuple(names[id(param)] for param in trained)
        return GroupRule(self.kind, params, self._flags(group))

    def _flags(self, group: Mapping[str, Any]) -> frozenset[str]:
        flags = {
            flag
            for flag in ("nesterov", "amsgrad", "maximize", "centered")
            if group.get(flag, False)
        }
        # Whether they are 0 decides which tensors exist; the number itself is an input of the program.
        flags |= {f for f in ("momentum", "dampening", "weight_decay") if group.get(f, 0) != 0}
        if group.get("decoupled_weight_decay", isinstance(self.optimizer, torch.optim.AdamW)):
            flags.add("decoupled")
        if self.kind == "lamb":
            flags.add("decoupled")
        if not getattr(self.optimizer, "bias_correction", True):
            flags.add("uncorrected")
        if getattr(self.optimizer, "use_tf_variant", False):
            flags.add("tf")
        # Without momentum they change nothing, and would only make another program.
        if "momentum" not in flags:
            flags -= {"dampening", "nesterov"}
        return frozenset(flags)
