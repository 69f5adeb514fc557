"""Running a function over a whole dataset on the device: `evaluate` and `predict`."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Mapping
from contextlib import closing
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tailrace.base.messages import note_once
from tailrace.base.trees import Tree, TreeDef
from tailrace.data.adapters import as_dataset
from tailrace.data.form_runs import form_runs
from tailrace.devices.processes import distributed
from tailrace.errors import DataError, DataExhausted, ProgramError
from tailrace.feeds import dispatch_table
from tailrace.feeds.elements import ElementSpec, call_with_element
from tailrace.feeds.infeed import InfeedQueue
from tailrace.feeds.outfeed import OutfeedQueue
from tailrace.jaxprs.array_trees import check_arrays
from tailrace.jaxprs.marks import current_trace, path_name
from tailrace.program.compiling.build import Build
from tailrace.program.running.agreement import agreed_seconds
from tailrace.program.running.dispatch_lengths import piece_within
from tailrace.program.running.loop_runner import LoopRunner
from tailrace.program.running.loop_state import LoopState, Numbers
from tailrace.program.running.placement import Placement
from tailrace.program.step.accumulation import check_weights
from tailrace.program.step.training_step import Step
from tailrace.taps.frame import Emission
from tailrace.trainer.evaluation.combining import Combine, Combined

Shape = Callable[[Any], Any]
"""What of a function's result is sent out."""


class _Weighted(NamedTuple):
    """What of a function's result is sent out, and the weight of its batch beside it."""

    shape: Shape
    weight: Callable[[Tree], Any]


MOST_RUNNERS = 16
"""The most cached programs: a new lambda for each call would otherwise fill the memory."""


class Evaluator:
    """Runs programs that read a dataset and send out a function's result for each element."""

    def __init__(
        self, step: Step, placement: Placement, seed: int, build: Callable[[], Build] = Build
    ) -> None:
        self._step, self._placement, self._seed, self._build = step, placement, seed, build
        self._runners: dict[Hashable, tuple[LoopRunner, OutfeedQueue]] = {}

    def evaluate(
        self,
        dataset: object,
        fn: Callable[..., Any] | None,
        read: tuple[Tree, Tree],
        combine: Combine,
        timeout_s: float | None,
        weighted: bool = False,
    ) -> dict[str, Any]:
        """The combined values of `fn` over all batches, by name.

        With `weighted`, a batch counts by the weight that it has in training, if it has one there.
        """
        combined, each = Combined(combine), []
        shape: Shape | _Weighted = _scalars_of if fn is None else _values_of
        fn = self._loss if fn is None else fn
        if weighted and self._step.accumulation.weight is not None:
            shape = _Weighted(shape, self._step.weight)
        for values, spec in self._run(dataset, fn, read, shape, timeout_s):
            weights = None
            if isinstance(shape, _Weighted):
                values, weights = values
                each.append(weights := weights.astype(np.float64))
            combined.add(values, rows_of(spec), weights)
        if each:
            check_weights(np.concatenate(each)[None], _place_of)
        return combined.results()

    def predict(
        self,
        dataset: object,
        fn: Callable[..., Any],
        read: tuple[Any, Any],
        timeout_s: float | None,
    ) -> Any:
        """All results, concatenated."""
        parts, sizes = [], []
        for tree, spec in self._run(dataset, fn, read, None, timeout_s):
            parts.append(tree)
            sizes.append({shape[0] for shape in spec.shapes if shape})

        def join(*blocks: np.ndarray) -> np.ndarray:
            # [elements, rows, ...]: rows of batches are joined; what has no rows is stacked by
            # element.
            by_row = all(
                block.ndim > 1 and size == {block.shape[1]}
                for block, size in zip(blocks, sizes, strict=True)
            )
            if by_row:
                blocks = tuple(block.reshape(-1, *block.shape[2:]) for block in blocks)
            shapes = {block.shape[1:] for block in blocks}
            if len(shapes) > 1:
                raise ProgramError(
                    f"predict stacks what the function returns for each batch, but a smaller batch "
                    f"gave another shape: {sorted(shapes)}. Return arrays whose leading dim is the "
                    f"batch's, or of one shape; or use tr.batches(..., drop_remainder=True)."
                )
            return np.concatenate(blocks)

        return jax.tree.map(join, *parts)

    def stream(
        self,
        dataset: object,
        fn: Callable[..., Any],
        read: tuple[Any, Any],
        timeout_s: float | None,
    ) -> Iterator[Any]:
        """Results one by one, soon after they are computed."""
        # Closed explicitly: since Python 3.12 a closed generator may keep its iterator alive.
        with closing(self._run(dataset, fn, read, None, timeout_s, live=True)) as results:
            while True:
                # Around each step of it: between them the caller goes on, with a mesh or without.
                with self._placement.outside():
                    found = next(results, None)
                if found is None:
                    return
                leaves, structure = jax.tree.flatten(found[0])
                for row in zip(*leaves, strict=True):
                    yield jax.tree.unflatten(structure, row)

    # -- inside ---------------------------------------------------------------------------------

    def _loss(self, params: Tree, model_state: Tree, batch: Tree, inputs: Tree = ()) -> Any:
        trace = current_trace("evaluate")
        # Asked for this call alone: the program may draw keys elsewhere, for good reason.
        before, trace.draws_keys = trace.draws_keys, False
        loss, _, aux = self._step.forward(params, model_state, batch, inputs)
        if trace.draws_keys:
            note_once(
                "evaluate runs the training loss, which draws random keys (dropout?). Ask "
                "tr.training() in it, or give the trainer an eval_fn=.",
                key="evaluate draws keys",
            )
        trace.draws_keys |= before
        return loss, aux

    def _run(
        self,
        dataset: object,
        fn: Callable[..., Any],
        read: tuple[Any, Any],
        shape: Shape | _Weighted | None,
        timeout_s: float | None,
        live: bool = False,
    ) -> Generator[tuple[Any, ElementSpec], None, None]:
        """Results of every element, some at a time; one program per shape of elements."""
        source = as_dataset(dataset)
        if source.endless and not live:
            raise DataError(
                f"All elements of a dataset are read, but {source.name} repeats without end. Use a "
                f"dataset that does not repeat, or predict(..., live=True)."
            )
        # Several processes run one program together, so all elements must have one shape.
        alone = self._placement.in_one_process
        for part in form_runs(dataset) if alone else (dataset,):
            yield from self._run_of_one_form(part, fn, read, shape, timeout_s, live)

    def _run_of_one_form(
        self,
        dataset: object,
        fn: Callable[..., Any],
        read: tuple[Any, Any],
        shape: Shape | _Weighted | None,
        timeout_s: float | None,
        live: bool,
    ) -> Generator[tuple[Any, ElementSpec], None, None]:
        key, runner, out, infeed = self._runner_for(dataset, fn, read, shape, timeout_s)
        state = self._step.begin_evaluating(runner, read)
        replicas = runner.placement.replicas
        spec = infeed.spec()
        # One capacity for all lengths: the last, shorter execution then needs no other program.
        most = runner.capacity = piece_within(1000, runner.bytes_per_pass)
        length = 1 if live else most
        structure = runner.traced.outfeeds[out].structure
        waiting: Any = None
        position = 0
        try:
            while True:
                started, compiled = time.perf_counter(), runner.compile_s
                ran = self._dispatched(runner, state, infeed, length, position)
                if ran is None:
                    break
                emitted, found, length = ran
                position += length
                # The results of the execution before, while this one runs.
                if waiting is not None:
                    yield _taken(*waiting), spec
                made = (emitted[out].value, runner.by_element)
                waiting = (structure, *made, _counts(found), replicas)
                if live:
                    yield _taken(*waiting), spec
                    waiting = None
                    elapsed = time.perf_counter() - started - (runner.compile_s - compiled)
                    elapsed = agreed_seconds(elapsed)
                    # Measured once, on single elements: they come at the pace that was asked for from
                    # the next one on.
                    if length == 1:
                        length = min(most, max(1, int(dispatch_table.LIVE_S / max(elapsed, 1e-6))))
            if waiting is not None:
                yield _taken(*waiting), spec
        finally:
            infeed.rest()
            self._runners[key] = (runner, out)
            while len(self._runners) > MOST_RUNNERS:
                del self._runners[next(iter(self._runners))]

    def _dispatched(
        self, runner: LoopRunner, state: LoopState, infeed: InfeedQueue, length: int, position: int
    ) -> tuple[Mapping[Hashable, Emission], int, int] | None:
        """Run `length` passes, or as many as there are elements for; None if there are none left.

        Returns:
            The emissions, the number of elements of this process, and the number of passes.
        """
        local = runner.elements_per_pass  # the number of this process
        numbers = Numbers(self._seed, position)
        try:
            return runner.dispatch(state, length, numbers)[0], length * local, length
        # Tried first, counted only when it fails: how long a dataset is, is mostly unknown, and nothing
        # of what was read is lost.
        except DataExhausted:
            found = infeed.remaining(length * local)
        length = -(-_most(found) // local)
        if not length:
            return None
        # Replicas run together: a step that only some have elements for is filled up, and the results
        # of the copies are dropped by `_taken`.
        if found < length * local:
            infeed.pad(found, length * local)
        return runner.dispatch(state, length, numbers, 0)[0], found, length

    def _runner_for(
        self,
        dataset: object,
        fn: Callable[..., Any],
        read: tuple[Any, Any],
        shape: Shape | _Weighted | None,
        timeout_s: float | None,
    ) -> tuple[Hashable, LoopRunner, OutfeedQueue, InfeedQueue]:
        infeed = InfeedQueue(dataset, timeout_s=timeout_s)
        infeed.bind_replicas(self._placement.replicas)
        # Each function is traced; equal programs are found again when they are to be compiled.
        key = (infeed.spec(), fn, shape)
        # Removed from the cache while it runs: a partly read stream must keep its infeed.
        found = self._runners.pop(key, None)
        if found is not None:
            runner, out = found
            runner.infeeds[0].adopt(infeed)
            runner.infeeds[0].patience = infeed.patience
            runner.rebuild(self._build())  # a fit that was taken up may have changed it
            return key, runner, out, runner.infeeds[0]
        out = OutfeedQueue()
        own = getattr(fn, "__self__", None) is self
        name = "the loss" if own else getattr(fn, "__name__", type(fn).__name__)

        def compute(params: Tree, model_state: Tree, batch: Tree, inputs: Tree) -> Any:
            whole, precision = batch, self._step.precision
            if precision is not None:
                params, batch, inputs = precision.narrow((params, batch, inputs))
            # Functions of ours take the model state in any case; a user's takes it if there is one.
            if getattr(fn, "__self__", None) in (self, self._step):  # ours
                result = fn(params, model_state, batch, inputs)
            else:
                first = (params, model_state) if self._step.has_model_state else (params,)
                result = call_with_element(fn, (*first, *inputs), batch)
            if not jax.tree.leaves(result):
                raise ProgramError(
                    f"{name} returns at least one array for each batch. Received: {result!r}. Is its "
                    f"return statement missing?"
                )
            check_arrays(f"{name} returns", result)
            if precision is not None:
                result = precision.widen(result)
            if isinstance(shape, _Weighted):
                return shape.shape(result), shape.weight(whole)  # of the batch as it came
            return jax.tree.map(jnp.asarray, result) if shape is None else shape(result)

        runner = self._step.evaluating(compute, out, infeed, read, self._placement)
        runner.build = self._build()
        # Shown while it compiles, and stored with the compilation.
        runner.purpose = f"evaluation of {name}"
        return key, runner, out, infeed


def _place_of(index: tuple[int, ...]) -> str:
    return "all batches that evaluate read" if len(index) == 1 else f"batch {index[1]} of evaluate"


def rows_of(spec: ElementSpec) -> int:
    """The number of rows of an element; 1 if its arrays have different leading sizes."""
    sizes = {shape[0] for shape in spec.shapes if shape}
    return sizes.pop() if len(sizes) == 1 else 1


def _values_of(result: Tree) -> dict[str, Any]:
    """The values to combine, by name: from a dict, (loss, aux), or a single value."""
    if isinstance(result, tuple) and len(result) == 2:
        loss, aux = result
        if isinstance(aux, tuple) and len(aux) == 2:  # (loss, (new_state, aux))
            aux = aux[1]
        others = dict(aux) if isinstance(aux, dict) else {"aux": aux}
        if "loss" in others:
            others["aux/loss"] = others.pop("loss")
        result = {"loss": loss, **others}
    elif not isinstance(result, dict):
        result = {"loss": result}
    return {
        path_name(path): jnp.asarray(value)
        for path, value in jax.tree_util.tree_flatten_with_path(result)[0]
    }


def _scalars_of(result: Tree) -> dict[str, Any]:
    """The loss and the other scalars, as in the history of a fit."""
    return {name: value for name, value in _values_of(result).items() if value.ndim == 0}


def _counts(found: int) -> list[int]:
    """The number of elements of each process in one execution."""
    return [said["found"] for said in distributed.meet({"found": found})]


def _most(found: int) -> int:
    return max(_counts(found))


def _taken(
    structure: TreeDef,
    leaves: Iterable[jax.Array],
    by_element: Callable[[np.ndarray], np.ndarray],
    found: list[int],
    replicas: int,
) -> Any:
    """The results of the elements found, in order, on the host."""

    def one(leaf: jax.Array) -> np.ndarray:
        array = by_element(np.asarray(leaf))
        if replicas == 1:
            return array[: found[0]]
        array = np.moveaxis(array, 0, 1)
        local = replicas // len(found)
        # Element t*local + r of a process is that of its replica r in pass t.
        number = np.arange(len(array))[:, None] * local + np.arange(replicas) % local
        return array[number < np.repeat(found, local)]

    return jax.tree.unflatten(structure, [one(leaf) for leaf in leaves])
