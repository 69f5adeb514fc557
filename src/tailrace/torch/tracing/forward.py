"""One forward pass of a model on one microbatch, with its outputs named and its loss found."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import torch

from tailrace.base.messages import note_once
from tailrace.base.trees import Tree
from tailrace.jaxprs.internals import Jaxpr
from tailrace.jaxprs.marks import ProgramTrace, Tag, mark, tracing
from tailrace.program.in_program import key
from tailrace.torch.calls.arrays import array_of, tensor_of
from tailrace.torch.calls.containers import rebuild
from tailrace.torch.calls.inputs import CallForm
from tailrace.torch.calls.returned_tensors import as_returned
from tailrace.torch.tracing.backward_hooks import refuse_backward_hooks
from tailrace.torch.tracing.gradient_reach import inputs_with_gradient
from tailrace.torch.tracing.losses import computed_after, final_loss
from tailrace.torch.tracing.module_function import ModuleFunction, Ran


class _Leaf:
    """Stands in the structure of outputs for a tensor that the program computes."""


@dataclasses.dataclass(eq=False)
class Forward:
    """A module's forward pass for calls of one form.

    Attributes:
        function: the module as a function.
        form: how the model is called.
        names: the outputs that the program computes, in order.
        template: what forward returns, with a placeholder for each of them.
        loss: which of the losses computed is the final one; None where none is looked for.
        devices: the device of each stage that the blocks in forward make; empty without blocks.
        unused: the parameters that the loss does not depend on; PyTorch gives them no gradient.
        written: the inputs that forward changes in place, which the caller's tensors follow.
        changed: the buffers that forward changes.
        scalars: the outputs that are one number for each microbatch, as losses are.
    """

    function: ModuleFunction
    form: CallForm
    names: list[str] = dataclasses.field(default_factory=list)
    template: Any = None
    loss: int | None = None
    devices: list[int] = dataclasses.field(default_factory=list)
    unused: frozenset[str] = frozenset()
    written: list[str] = dataclasses.field(default_factory=list)
    changed: frozenset[str] = frozenset()
    scalars: frozenset[str] = frozenset()

    def learn(self, params: Mapping[str, Any], buffers: Mapping[str, Any], training: bool) -> None:
        """Trace once, without running anything, to see what there is."""
        seen: list[Ran] = []
        module = self.function.module
        # Inference never asks for gradients, so hooks and backward methods are left alone.
        self.function.differentiated = training
        if training:
            refuse_backward_hooks(module)

        def look(params: Tree, buffers: Tree, element: Tree, seed: jax.Array) -> list[Any]:
            ran = self._run(params, buffers, element, seed)
            seen[:] = [ran]
            return [*ran.losses, *(value for _, value in ran.leaves)]

        # A trace of its own, without the loop around it: which outputs and losses there are decides
        # what the program of a call returns, so it must be known before that is traced.
        element = self.form.spec().tree()
        # The form of a key: a concrete one would run on the device.
        seed = jax.eval_shape(lambda: jax.random.key(0))
        with tracing(ProgramTrace()):
            closed = jax.make_jaxpr(look)(params, buffers, element, seed)
        (ran,) = seen
        self.loss, self.unused = None, frozenset()
        if training:
            refuse_backward_hooks(module)  # forward may have made some
            # The first inputs of the trace are the parameters: JAX flattens a dict by sorted keys.
            inputs = dict(zip(sorted(params), closed.jaxpr.invars, strict=False))
            self.loss = self._find_loss(closed.jaxpr, ran, inputs)
            used = inputs_with_gradient(closed.jaxpr, [closed.jaxpr.outvars[self.loss]])
            self.unused = frozenset(name for name, var in inputs.items() if var not in used)
        self.devices = [device for _, device in ran.watch.stages]
        self.names = [name for name, _ in ran.leaves]
        # Only scalars: on tensors of any shape a subclass would be in the way of the user's own code.
        self.scalars = frozenset(name for name, value in ran.leaves if not value.shape)
        self.written = [self.form.names[number] for number in ran.written]
        self.changed = ran.changed
        self.template = rebuild(ran.outputs, _placed)

    def _find_loss(self, jaxpr: Jaxpr, ran: Ran, params: Mapping[str, Any]) -> int:
        """Which of the losses trains; says so where something is computed from it afterwards."""
        module = self.function.module
        trained = {name for name, value in module.named_parameters() if value.requires_grad}
        inputs = {var for name, var in params.items() if name in trained}
        count = len(ran.losses)
        found = final_loss(jaxpr, jaxpr.outvars[:count], inputs)
        after = computed_after(jaxpr, jaxpr.outvars[found], jaxpr.outvars[count:])
        if after:
            names = ", ".join(repr(ran.leaves[number][0]) for number in after)
            note_once(
                f"{type(module).__name__} trains by the result of a loss function, and what is "
                f"computed from it afterwards (output {names}) does not count. If that is the loss, "
                f"mark it: tt.identity_loss(value, reduction='mean'), or 'none'. If it is for show, "
                f"detach() it."
            )
        return found

    @property
    def spread(self) -> bool:
        """Whether the blocks are on more than one device."""
        return len(set(self.devices)) > 1

    def __call__(self, params: Tree, buffers: Tree, element: Tree) -> tuple[Any, dict[str, Any]]:
        """(loss, next buffers); the outputs are marked by name. Called while a program is traced."""
        ran = self._run(params, buffers, element, key())
        for name, value in ran.leaves:
            # Through taps, like everything that is observed: what a call returns (all, the last, a
            # sum) is the mode of a tap.
            mark(value, Tag("value", f"output/{name}"))
        # Arguments that forward has changed leave like outputs, under names of their own.
        for number, value in ran.written.items():
            mark(value, Tag("value", f"output/{written_name(self.form.names[number])}"))
        loss = None if self.loss is None else ran.losses[self.loss]
        return loss, ran.buffers

    def outputs(self, arrays: Mapping[str, Any]) -> Any:
        """What a call returns, from the arrays of its outputs."""
        values = iter(self.names)

        def tensor(name: str) -> torch.Tensor:
            found = tensor_of(arrays[name])
            return as_returned(found) if name in self.scalars else found

        return rebuild(self.template, lambda v: tensor(next(values)) if v is _Leaf else v)

    def _run(self, params: Tree, buffers: Tree, element: Tree, seed: jax.Array) -> Ran:
        def fill(wrap: Callable[[Any], Any]) -> Any:
            return self.form.arguments(element, wrap)

        return self.function(params, buffers, fill, seed)


def written_name(name: str) -> str:
    """What an input that was changed in place is called among the outputs."""
    return f"written {name}"


def weights_of(module: torch.nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Parameters, and buffers (with parameters that cannot have a gradient), as arrays by name."""
    params, buffers = {}, {}
    for name, value in module.named_parameters():
        kind = params if value.dtype.is_floating_point or value.dtype.is_complex else buffers
        kind[name] = array_of(value)
    buffers.update({name: array_of(value) for name, value in module.named_buffers()})
    return params, buffers


def _placed(value: object) -> Any:
    return _Leaf if isinstance(value, jax.Array) else value
