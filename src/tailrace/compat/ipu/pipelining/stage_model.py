"""The stages of a pipeline as one model; and inference, which is that model in two nested loops."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tailrace.base.array_like import TensorLike
from tailrace.base.trees import Tree
from tailrace.compat.ipu import loops
from tailrace.compat.ipu.errors import IPUValueError
from tailrace.compat.ipu.graph.operations import Operation
from tailrace.compat.ipu.graph.variables import as_array
from tailrace.compat.ipu.ipu_infeed_queue import arguments_of
from tailrace.compat.ipu.pipelining.pipeline_options import PipelineOptions
from tailrace.feeds.infeed import InfeedQueue
from tailrace.jaxprs.marks import Tag, mark
from tailrace.pipeline.boundary import BESIDE, NEXT, boundary


def through_stages(
    options: PipelineOptions,
    inputs: Sequence[Any],
    element: Tree,
    at_stage: Callable[[], None] = lambda: None,
    forwarded: dict[int, int] | None = None,
) -> Any:
    """What the last stage returns for one element; `at_stage` is called where each one begins.

    `forwarded` is filled with the places of outputs that are inputs which every stage has passed on,
    and the places of those inputs.
    """
    args, kwargs = arguments_of(element) if options.infeed_queue is not None else ((), {})
    values: list[Any] = [*inputs, *args]
    # Which input of the pipeline each value is, if any: a rate passed through all stages stays one.
    sources: list[int | None] = [*range(len(inputs)), *[None] * len(args)]
    out: Any = None
    for number, stage in enumerate(options.computational_stages):
        members = stage if isinstance(stage, list | tuple) else [stage]
        flat: list[Any] = []
        origins: list[int | None] = []
        for member, function in enumerate(members):
            # Nothing comes before the first member of the first stage.
            if number or member:
                values = boundary(values, BESIDE if member else NEXT)
            at_stage()
            out = function(*values, **kwargs)
            origins += _origins(out, values, sources)
            # A stage that only passes on what it gets is a stage as well: it holds this mark.
            flat += mark(outputs_of(out), Tag("end of a stage"))
        out = out if len(members) == 1 else flat
        values, sources, kwargs = flat, origins, {}
    if forwarded is not None:
        forwarded.update({place: n for place, n in enumerate(sources) if n is not None})
    if isinstance(out, dict):
        return {key: values[0][key] for key in out}  # in its own order, which JAX's trees forget
    return values if isinstance(out, list | tuple) or len(values) != 1 else values[0]


def _origins(out: Tree, values: list[Any], sources: list[int | None]) -> list[int | None]:
    """For each output of a stage, the pipeline input that it passes on; None if it is computed."""
    found: list[int | None] = []
    for value in out if isinstance(out, list | tuple) else [out]:
        if value is None or isinstance(value, Operation):
            continue
        # By identity: a stage passes an input on if it returns the very same value.
        place = next((n for n, given in enumerate(values) if given is value), None)
        found.append(None if place is None else sources[place])
    return found


def outputs_of(out: Tree) -> list[Any]:
    """The outputs of a stage as the arguments of the next one; operations are left out."""
    values = out if isinstance(out, list | tuple) else [out]
    return [
        jax.tree.map(as_array, value)
        for value in values
        if value is not None and not isinstance(value, Operation)
    ]


def sent_of(options: PipelineOptions, out: Tree, loss: TensorLike) -> Any:
    """What of a mini-batch goes to the outfeed; None: nothing."""
    if options.outfeed_loss:
        return loss
    # A training pipeline sends a list, also of one; an inference pipeline what the last stage returned.
    values = out if isinstance(out, list) else [out]
    if options.outfeed_mask is not None:
        if len(options.outfeed_mask) != len(values):
            raise IPUValueError(
                f"The length of the outfeed_mask and the number of outputs of the last stage need to "
                f"be the same: {len(options.outfeed_mask)} != {len(values)}."
            )
        values = [v for v, hide in zip(values, options.outfeed_mask, strict=True) if not hide]
    if options.training:
        return values or None
    return None if isinstance(out, list) and not out else out


def need_outfeed(options: PipelineOptions, out: Tree) -> None:
    """Refuse outputs of the last stage that go nowhere."""
    hidden = options.outfeed_mask is not None and all(options.outfeed_mask)
    if options.outfeed_queue is None and jax.tree.leaves(out) and not hidden:
        shapes = [f"{leaf.dtype}{list(leaf.shape)}" for leaf in jax.tree.leaves(out)]
        raise IPUValueError(
            f"The last computational stage has tensor outputs: {', '.join(shapes)} but no "
            f"outfeed_queue has been provided."
        )


def sum_dtype(options: PipelineOptions, value: TensorLike) -> Any:
    """The dtype in which an accumulated outfeed adds values like this one."""
    wanted = options.accumulate_outfeed_dtype
    if wanted is None:
        return value.dtype
    # A function of the value is allowed, and some dtypes are classes, which can be called too.
    try:
        return jnp.dtype(wanted)
    except TypeError:
        return jnp.dtype(wanted(value))


def summed(options: PipelineOptions, values: TensorLike) -> Any:
    """Values of mini-batches, [executions * mini-batches, ...], added up for each execution."""
    dtype = sum_dtype(options, values)
    grouped = values.reshape(-1, options.mini_batches, *values.shape[1:])
    return grouped.astype(dtype).sum(axis=1, dtype=dtype)


def infeed_of(options: PipelineOptions, replicas: int) -> InfeedQueue:
    """The engine's infeed of a pipeline, also of one without data."""
    if options.infeed_queue is not None:
        return options.infeed_queue.take_part(replicas)
    # The engine counts mini-batches by the elements they take.
    return InfeedQueue(itertools.repeat(np.zeros((), np.float32)))


# -- inference ------------------------------------------------------------------------------------


def infer(options: PipelineOptions) -> None:
    """The stages in a loop over mini-batches, in a loop over repeats."""
    inputs = [as_array(value) for value in options.inputs]
    queue = options.outfeed_queue
    element = None
    if options.infeed_queue is not None:
        element = options.infeed_queue.take_part(None).spec().tree()

    def model(element: Tree) -> Any:
        out = through_stages(options, inputs, element)
        need_outfeed(options, out)
        return out

    def element_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return kwargs or list(args)

    def one_run() -> None:
        if not options.accumulate_outfeed:

            def body(*args: Any, **kwargs: Any) -> Any:
                sent = sent_of(options, model(element_of(args, kwargs)), None)
                return None if queue is None or sent is None else queue.enqueue(sent)

            loops.repeat(options.mini_batches, body, [], options.infeed_queue)
            return
        assert queue is not None
        args, kwargs = ((), {}) if element is None else arguments_of(element)
        # The sums need a shape before the loop begins.
        form = jax.eval_shape(model, element_of(args, kwargs))
        leaves, structure = jax.tree.flatten(form)
        zeros = [jnp.zeros(leaf.shape, sum_dtype(options, leaf)) for leaf in leaves]

        def adding(*args: Any, **kwargs: Any) -> Any:
            out = jax.tree.leaves(model(element_of(args[len(zeros) :], kwargs)))
            # Not strict: after the sums, `args` has the element.
            return [acc + value.astype(acc.dtype) for acc, value in zip(args, out, strict=False)]

        total = loops.repeat(options.mini_batches, adding, zeros, options.infeed_queue)
        total = total if isinstance(total, list) else [total]
        sums = jax.tree.unflatten(structure, total)
        queue.enqueue(sums if isinstance(sums, list | dict) else [sums])

    loops.repeat(options.repeat_count, one_run, [])
