"""A training pipeline: which variables are what, and the trainer that runs it.

The variables that the optimizer trains are the trainer's parameters; others that stages touch
are model state; those that only the optimizer touches are the optimizer's state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import tailrace as tr
from tailrace.base.array_like import TensorLike
from tailrace.base.trees import Tree
from tailrace.compat.arguments import OptimizerLike
from tailrace.compat.ipu import config
from tailrace.compat.ipu.errors import IPUTypeError, IPUValueError
from tailrace.compat.ipu.graph.discovery import discover, keras_scope
from tailrace.compat.ipu.graph.seeding import seeding
from tailrace.compat.ipu.graph.state import (
    Scope,
    inside,
    scope_of,
    value_of,
    write_host,
)
from tailrace.compat.ipu.graph.update import KerasOptimizer
from tailrace.compat.ipu.graph.variables import Variable, as_array
from tailrace.compat.ipu.optimizers import (
    GradientAccumulationOptimizerV2,
    IpuOptimizer,
    MapGradientOptimizer,
    Optimizer,
)
from tailrace.compat.ipu.pipelining.optimizer_output import OptimizerFunctionOutput
from tailrace.compat.ipu.pipelining.pipeline_options import PipelineOptions
from tailrace.compat.ipu.pipelining.stage_model import (
    infeed_of,
    need_outfeed,
    sent_of,
    summed,
    through_stages,
)
from tailrace.feeds.outfeed import OutfeedQueue
from tailrace.trainer.engine import Engine


class Training:
    """A training pipeline: which variables are what, and the trainer that runs it."""

    def __init__(self, options: PipelineOptions, ordinal: int) -> None:
        self.options = options
        self.replicas = config.replicas(options.shards, ordinal)
        self._private = OutfeedQueue() if options.accumulate_outfeed else None
        self._queue = infeed_of(options, self.replicas)
        element = self._queue.spec().tree()
        inputs = [as_array(value) for value in options.inputs]
        # An input that reaches the optimizer, such as a rate, is a variable of the optimizer's.
        self._given = [Variable(value, trainable=False, name="pipeline input") for value in inputs]
        self._forwarded: dict[int, int] = {}
        self._output: Any = None
        # Stages and optimizer are looked through apart: who touches a variable decides what it is.
        self._stage_found = discover(self._look, (inputs, element))
        self._opt = self._output.opt
        _check_optimizer(self._opt)
        self.trained = self._output.trained(list(self._stage_found.variables.values()))
        ours = set(map(id, self.trained))
        self.buffers = [v for v in self._stage_found.variables.values() if id(v) not in ours]
        values = [jnp.asarray(value_of(variable)) for variable in self.trained]
        self._accumulation = tr.Accumulation(
            options.mini_batches,
            options.gradient_accumulation_dtype,
            options.reduction_method.reduction,
        ).choosing_by({f"[{number}]": variable for number, variable in enumerate(self.trained)})
        # The optimizer gets gradients of the accumulators' dtype.
        self._apply_found = discover(self._apply, (self._accumulation.zeros(values),))
        self.slots = [v for v in self._apply_found.variables.values() if id(v) not in ours]
        self._check_roles(ours)
        if _mappings(self._opt) and self._shared & ours:
            raise IPUValueError(
                "MapGradientOptimizer maps gradients where they come out of a stage, and a variable "
                "that several stages use has one from each. Map them in apply_gradients, or use the "
                "variable in one stage."
            )
        self._engine = self._make_engine(inputs, values)
        self._left = [value_of(v) for v in (*self.trained, *self.slots, *self.buffers)]

    def run(self, inputs: Sequence[Any]) -> None:
        """One call: `repeat_count` updates."""
        engine, options = self._engine, self.options
        if options.infeed_queue is not None:
            options.infeed_queue.queue()  # it may have been deleted since
        arrays = [as_array(value) for value in inputs]
        engine.set_inputs(arrays)
        for variable, value in zip(self._given, arrays, strict=True):
            # Only if it differs: a new array would be copied to the devices in every call.
            if not np.array_equal(value_of(variable), value):
                variable.settle(value)
        variables = [*self.trained, *self.slots, *self.buffers]
        # By identity: comparing values would copy every parameter to the host in each call.
        changed = {
            number: jnp.asarray(value)
            for number, value in enumerate(map(value_of, variables))
            if value is not self._left[number]  # written on the host since the last call
        }
        if changed:
            engine.replace(changed)
        feed = engine.use(self._queue)
        try:
            with engine.delivering():
                # Nothing is staged for a next call, which may never come.
                results = engine.collect(engine.dispatch(options.repeat_count, following=0))
        finally:
            # No thread between calls, which may be far apart.
            feed.rest()
        # Copies: the next dispatch overwrites the engine's own arrays.
        for variable, value in zip(
            variables, jax.tree.leaves(engine.copied(engine.state)), strict=True
        ):
            write_host(variable, value)
        self._left = [value_of(variable) for variable in variables]
        if (
            results.failure is not None
        ):  # only now: the variables are those after the steps that ran
            raise results.failure
        if self._private is not None:
            self._deliver_sums()

    # -- the model --------------------------------------------------------------------------------

    def _look(self, inputs: Tree, element: Tree) -> Any:
        scope, before = inside("a pipeline"), Counter()

        # How many stages touch a variable: `seen` is emptied where each one begins.
        def at_stage() -> None:
            before.update(list(scope.seen))
            scope.seen.clear()

        self._forwarded.clear()
        out = through_stages(self.options, inputs, element, at_stage, self._forwarded)
        at_stage()
        self._shared = {key for key, count in before.items() if count > 1}
        # The optimizer function may ask for all trainable variables: those of all stages.
        scope.seen.update(scope.found.variables)
        self._output = self._optimizer_output(out)
        sent = sent_of(self.options, out, self._output.loss)
        if sent is not None and not self.options.outfeed_loss:
            need_outfeed(self.options, out)
        return self._output.loss

    def _optimizer_output(self, out: Tree) -> Any:
        assert self.options.optimizer_function is not None
        values = list(out) if isinstance(out, list) else [out]
        # The optimizer gets the variable, not the traced value: it runs once per update, not per batch.
        for place, number in self._forwarded.items():
            values[place] = self._given[number]
        found = self.options.optimizer_function(*values)
        if not isinstance(found, OptimizerFunctionOutput):
            raise IPUTypeError(
                f"optimizer_function must return an OptimizerFunctionOutput. "
                f"Received: {type(found).__name__}."
            )
        return found

    def _loss(self, params: Tree, model_state: Tree, *args: Any, **kwargs: Any) -> Any:
        """The loss function of the engine: all stages, the optimizer function, the outfeed."""
        options, count = self.options, len(self.options.inputs)
        inputs, element = args[:count], kwargs or list(args[count:])
        scope = Scope(self._stage_found, looking=False)
        self._stage_found.keep.begin()
        scope.values.update(zip(map(id, self.buffers), model_state["variables"], strict=True))
        mapping = _mappings(self._opt)

        def at_stage() -> None:
            # A gradient is mapped where it comes out of a stage, so each stage gets its own.
            for variable, value in zip(self.trained, params, strict=True):
                scope.values[id(variable)] = mapped(value, mapping) if mapping else value

        with keras_scope(), scope_of(scope):
            out = through_stages(options, inputs, element, at_stage)
            output = self._optimizer_output(out)
            sent = sent_of(options, out, output.loss)
            if sent is not None and options.outfeed_queue is not None:
                if self._private is not None:
                    # To a queue of our own, which `_deliver_sums` empties: the user's gets only the
                    # sums.
                    self._private.enqueue(sent)
                else:
                    options.outfeed_queue.enqueue(sent)
            after = [scope.read(variable) for variable in self.buffers]
        # The engine differentiates a scalar; the original sums a loss that is an array.
        return jnp.sum(output.loss), ({"variables": after}, None)

    def _make_engine(self, inputs: list[Any], values: list[Any]) -> Engine:
        options = self.options
        pipeline = tr.Pipeline(
            self._loss,
            accumulation=self._accumulation,
            schedule=options.pipeline_schedule.schedule,
            device_mapping=options.device_mapping,
            recompute=options.recompute,
            inputs=tuple(inputs),
        )
        return Engine(
            pipeline,
            self,
            values,
            model_state={"variables": [jnp.asarray(value_of(v)) for v in self.buffers]},
            replicas=self.replicas,
            seed=seeding().seed,
            offload_optimizer_state=options.offload_weight_update_variables,
            shard_optimizer_state=bool(options.replicated_optimizer_state_sharding),
            offload_activations=bool(options.offload_activations),
        )

    # -- the optimizer, as the engine has it ------------------------------------------------------

    def init(self, params: Tree) -> list[Any]:
        """The state of the optimizer: the values of its variables."""
        del params
        return [jnp.asarray(value_of(variable)) for variable in self.slots]

    def apply(self, grads: Tree, state: Tree, params: Tree) -> tuple[Any, Any]:
        """The parameters and the state after an update."""
        scope = Scope(self._apply_found, looking=False)
        scope.values.update(zip(map(id, self.trained), params, strict=True))
        scope.values.update(zip(map(id, self.slots), state, strict=True))
        with keras_scope(), scope_of(scope):
            self._apply(grads)
            return (
                [scope.read(variable) for variable in self.trained],
                [scope.read(variable) for variable in self.slots],
            )

    def _apply(self, grads: Tree) -> None:
        pairs = list(zip(grads, self.trained, strict=True))
        output = self._output
        self._opt.apply_gradients(
            pairs, *output.apply_gradients_args, **output.apply_gradients_kwargs
        )

    def _check_roles(self, ours: set[int]) -> None:
        # Stages run for each mini-batch, the optimizer once a step: a variable that both change
        # would have no single value.
        stage, optimizer = self._stage_found, self._apply_found
        for key in stage.written:
            if key in ours or key in optimizer.variables:
                raise IPUValueError(
                    f"{stage.variables[key]!r} is written by a stage and used by the optimizer. "
                    f"Variables that the optimizer uses may only be changed by it."
                )
        for key in optimizer.written:
            if key not in ours and key in stage.variables:
                raise IPUValueError(
                    f"{stage.variables[key]!r} is read by a stage and changed by the optimizer "
                    f"without being trained. Keep two variables."
                )

    # -- sums -------------------------------------------------------------------------------------

    def _deliver_sums(self) -> None:
        options = self.options
        assert self._private is not None
        assert options.outfeed_queue is not None
        found = self._private.dequeue()
        sums = jax.tree.map(lambda values: summed(options, values), found)
        options.outfeed_queue.deliver(sums)


def _check_optimizer(opt: OptimizerLike) -> None:
    """Refuse what a pipeline does itself, or cannot do: it computes the gradients."""
    _check_minimize(opt)
    while isinstance(opt, IpuOptimizer):
        _check_minimize(opt.inner)
        if isinstance(opt, GradientAccumulationOptimizerV2):
            raise IPUValueError(
                f"{opt.get_name()} is used in a pipeline, which accumulates gradients itself. Give "
                f"the optimizer inside of it, and gradient_accumulation_count to the pipeline."
            )
        # By identity of the method: a subclass that overrides it would never be called.
        known = (IpuOptimizer.compute_gradients, MapGradientOptimizer.compute_gradients)
        if type(opt).compute_gradients not in known:
            raise IPUValueError(_OWN_GRADIENTS.format(name=type(opt).__name__))
        opt = opt.inner
    own = getattr(type(opt), "compute_gradients", Optimizer.compute_gradients)
    if own is not Optimizer.compute_gradients:
        raise IPUValueError(_OWN_GRADIENTS.format(name=type(opt).__name__))


def _check_minimize(opt: OptimizerLike) -> None:
    """Refuse an optimizer that overrides `minimize`, which nothing would call."""
    kind = type(opt.optimizer) if isinstance(opt, KerasOptimizer) else type(opt)
    if getattr(kind, "minimize", Optimizer.minimize) is not Optimizer.minimize:
        raise IPUValueError(
            f"{kind.__name__} must not override OptimizerV2.minimize: a pipeline computes gradients "
            f"stage by stage and gives them to apply_gradients. Override apply_gradients, or change "
            f"the gradients of each mini-batch with MapGradientOptimizer."
        )


_OWN_GRADIENTS = (
    "{name} computes gradients in a way of its own, and a pipeline computes them stage by stage. "
    "Change the gradients with MapGradientOptimizer, or in apply_gradients."
)


def _mappings(opt: OptimizerLike) -> list[Callable[[Any, Any], Any]]:
    """What the optimizers around an optimizer do to the gradient of a mini-batch, inmost first."""
    found: list[Callable[[Any, Any], Any]] = []
    while isinstance(opt, IpuOptimizer):
        if isinstance(opt, MapGradientOptimizer):
            found.append(opt.gradient_mapping_function)
        opt = opt.inner
    return found[::-1]


def mapped(value: object, functions: Sequence[Callable[[Any, Any], Any]]) -> Any:
    """`value`, whose gradient goes through the functions on its way back."""

    @jax.custom_vjp
    def same(value: object) -> Any:
        return value

    def backward(value: object, grad: TensorLike) -> Any:
        for function in functions:
            grad = function(grad, value)
        return (grad,)

    # The value itself is what the mapping gets beside the gradient.
    same.defvjp(lambda value: (value, value), backward)
    return same(value)
