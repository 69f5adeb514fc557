"""A captured forward pass of a model on one microbatch: what programs are made of."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
import torch

from tailrace.base.trees import Tree
from tailrace.jaxprs.marks import ProgramTrace, Tag, mark, tracing
from tailrace.program.in_program import key
from tailrace.torch.calls.arrays import array_of, tensor_of
from tailrace.torch.calls.returned_tensors import as_returned
from tailrace.torch.capture.captured import capture
from tailrace.torch.capture.outputs import Template, tensors_in
from tailrace.torch.capture.sources import Source
from tailrace.torch.capture.trained import trained
from tailrace.torch.lowerings.evaluate import evaluate
from tailrace.torch.tracing.backward_hooks import refuse_backward_hooks
from tailrace.torch.tracing.forward import Forward, written_name
from tailrace.torch.tracing.gradient_reach import inputs_with_gradient
from tailrace.torch.tracing.module_function import (
    in_modes,
    quiet,
    without_looking_at_values,
)


@dataclasses.dataclass
class _Values:
    """What one forward pass yields, as JAX values.

    Attributes:
        results: the results of the graph.
        leaves: the tensors of the output: (name, value).
        buffers: the buffers afterwards.
        written: arguments that were changed in place, by their number.
    """

    results: list[Any]
    leaves: list[tuple[str, Any]]
    buffers: dict[str, Any]
    written: dict[int, Any]


@dataclasses.dataclass(eq=False)
class CapturedForward(Forward):
    """A module's forward pass for calls of one form, captured.

    Attributes:
        choice: which of the values returned is the loss.
    """

    choice: Any = None

    def learn(self, params: Mapping[str, Any], buffers: Mapping[str, Any], training: bool) -> None:
        """Capture the module, and see what there is."""
        module = self.function.module
        if training:
            refuse_backward_hooks(module)
        self._capture()
        self.loss, self.unused = None, frozenset()
        if training:
            self.loss = trained(self._captured, self.choice, type(module).__name__)
        element, seed = self.form.spec().tree(), jax.eval_shape(lambda: jax.random.key(0))
        values: list[_Values] = []

        def look(params: Tree, buffers: Tree, element: Tree, seed: jax.Array) -> Any:
            values[:] = [self._values(params, buffers, element, seed)]
            return None if self.loss is None else values[0].results[self.loss]

        with tracing(ProgramTrace()):
            closed = jax.make_jaxpr(look)(params, buffers, element, seed)
        if training:
            # The first inputs are the parameters: JAX flattens a dict by sorted keys.
            inputs = dict(zip(sorted(params), closed.jaxpr.invars, strict=False))
            used = inputs_with_gradient(closed.jaxpr, closed.jaxpr.outvars)
            self.unused = frozenset(name for name, var in inputs.items() if var not in used)
        (found,) = values
        self.names = [name for name, _ in found.leaves]
        self.scalars = frozenset(name for name, value in found.leaves if not np.ndim(value))
        self.written = [self.form.names[number] for number in found.written]

    def _capture(self) -> None:
        examples = self.form.examples()
        arguments = self.form.arguments(
            dict(zip(self.form.names, examples, strict=True)), lambda tensor: tensor
        )
        of_output = self.choice if callable(self.choice) else None
        modes = in_modes(self.function.module, self.function.training)
        with modes, without_looking_at_values():
            self._captured = capture(self.function.module, *arguments, of_output)
        captured = self._captured
        self._numbers = {id(tensor): number for number, tensor in enumerate(examples)}
        inside = {id(tensor): tensor for _, tensor in tensors_in(captured.output)}
        self._returned = Template(captured.output, list(inside.values()))
        self._constants: dict[int, Any] = {}
        sources = captured.sources
        self.changed = frozenset(
            sources[place].name for place in captured.written if sources[place].kind == "buffer"
        ) | frozenset(captured.rebound)

    def __call__(self, params: Tree, buffers: Tree, element: Tree) -> tuple[Any, dict[str, Any]]:
        """(loss, next buffers); the outputs are marked by name. Called while a program is traced."""
        values = self._values(params, buffers, element, key())
        for name, value in values.leaves:
            mark(value, Tag("value", f"output/{name}"))
        for number, value in values.written.items():
            mark(value, Tag("value", f"output/{written_name(self.form.names[number])}"))
        loss = None if self.loss is None else values.results[self.loss]
        return loss, values.buffers

    def outputs(self, arrays: Mapping[str, Any]) -> Any:
        """What a call returns, from the arrays of its outputs."""
        made: dict[int, torch.Tensor] = {}
        for path, stand_in in tensors_in(self._returned.value):
            name = path or "0"
            if id(stand_in) not in made:
                found = tensor_of(arrays[name])
                made[id(stand_in)] = as_returned(found) if name in self.scalars else found
        return self._returned.filled(lambda stand_in: made[id(stand_in)])

    def _values(self, params: Tree, buffers: Tree, element: Tree, seed: jax.Array) -> _Values:
        captured, weights = self._captured, {**params, **buffers}

        def value(source: Source) -> Any:
            if source.kind == "argument":
                return element[self.form.names[self._numbers[id(source.tensor)]]]
            if source.kind == "constant":
                return self._constant(source.tensor)
            return weights[source.name]

        inputs = [value(source) for source in captured.sources]
        results: list[Any] = []
        if captured.graph is not None:
            with self._settings():
                results = list(evaluate(captured.graph, inputs, seed))
        after, written = dict(buffers), {}
        now = dict(zip(map(id, captured.sources), inputs, strict=True))
        for place, number in captured.written.items():
            source = captured.sources[place]
            now[id(source)] = results[number]
            if source.kind == "buffer":
                after[source.name] = results[number]
            else:
                written[self._numbers[id(source.tensor)]] = results[number]
        after |= {name: results[number] for name, number in captured.rebound.items()}
        # The state of a loop keeps its dtypes.
        after = {name: v.astype(buffers[name].dtype) for name, v in after.items()}
        leaves = []
        for path, tensor in tensors_in(captured.output):
            place = captured.place(tensor)
            if isinstance(place, int):
                found = results[place]
            else:
                found = now[id(place)] if id(place) in now else value(place)
            leaves.append((path or "0", found))
        return _Values(results, leaves, after, written)

    def _constant(self, tensor: Any) -> Any:
        """A tensor from outside, as it was when the module was captured."""
        if not isinstance(tensor, torch.Tensor):
            return tensor
        if id(tensor) not in self._constants:
            self._constants[id(tensor)] = np.array(array_of(tensor))
        return self._constants[id(tensor)]

    @contextlib.contextmanager
    def _settings(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(quiet())
            # PyTorch's code mixes dtypes freely, also where the caller has made JAX strict.
            stack.enter_context(jax.numpy_dtype_promotion("standard"))
            if self.function.precision is not None:
                stack.enter_context(jax.default_matmul_precision(self.function.precision))
            yield
