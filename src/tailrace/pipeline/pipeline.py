"""`tr.Pipeline`: a model as stages, and the options of their execution."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from tailrace.base.trees import Tree
from tailrace.errors import OptionError, PipelineError, PlanError
from tailrace.feeds.elements import call_with_element
from tailrace.pipeline.boundary import BESIDE, NEXT, boundary
from tailrace.pipeline.lowering.forward_backward import RECOMPUTE
from tailrace.pipeline.schedule.plan import Plan, plan
from tailrace.pipeline.schedule.schedules import PipelineSchedule
from tailrace.pipeline.shared_weights import SharedWeights
from tailrace.program.step.accumulation import Accumulation

Stage = Callable[..., Any]


class Pipeline:
    """A model cut into stages that run on separate devices, many microbatches at a time.

    Given to `tr.Trainer` in place of a loss function.

    Args:
        stages: at least two functions `stage(params, *inputs) -> outputs`. Stage 0 gets `inputs` and
            the element of the dataset, each next one the outputs of the one before; a list in the
            list holds stages that run at the same time: they get the same inputs, and their outputs
            follow each other. With a model state, `stage(params, state, *inputs)` returns `(outputs,
            new_state)`. Or one function, called like a trainer's loss function, in which
            `tr.stage_boundary` marks where stages end.
        loss_fn: `loss_fn(*outputs_of_the_last_stage)` returns the loss or `(loss, aux)`; None if
            the last stage does, or if `stages` is one function.
        accumulation: the number of microbatches per update; or a `tr.Accumulation`.
        schedule: "grouped" (fastest), "interleaved" (less memory) or "sequential" (for debugging).
        device_mapping: the device of each stage, with a list for concurrent stages. Without it, each
            stage has a separate device.
        inputs: values that stage 0 gets before the element, the same for all microbatches;
            `trainer.fit(..., inputs=...)` changes them without compiling again.
        shared: groups of parameters that are one weight, as names: `[("0/table", "2/table")]`.
            Their gradients are summed; the optimizer sees the first of each group.
        recompute: keep only the inputs of each stage for its backward, and recompute the rest: "then"
            (or True) the whole stage at once, "interleaved" from one `tr.recomputation_checkpoint` to
            the next.

    Raises:
        OptionError: an argument has an invalid value.
        PipelineError: there are fewer than two stages, or the parameters or marks do not fit; some of
            this is known only when it is traced.
        PlanError: the number of microbatches or the mapping does not fit the schedule.

    Example:
        >>> import optax, jax.numpy as jnp, numpy as np, tailrace as tr
        >>> first = lambda w, x, y: (jnp.tanh(x * w), y)
        >>> second = lambda w, h, y: ((h * w - y) ** 2).mean()
        >>> pipeline = tr.Pipeline([first, second], accumulation=4, device_mapping=[0, 0])
        >>> trainer = tr.Trainer(pipeline, optax.sgd(0.1), [np.float32(1), np.float32(1)])
        >>> x = np.linspace(0, 1, 64, dtype=np.float32)
        >>> history = trainer.fit(tr.batches((x, 2 * x), 4), steps=4)
        >>> len(history.loss)
        4
    """

    def __init__(
        self,
        stages: Sequence[Stage | Sequence[Stage]] | Stage,
        loss_fn: Callable[..., Any] | None = None,
        *,
        accumulation: Accumulation | int = 1,
        schedule: PipelineSchedule | str = PipelineSchedule.GROUPED,
        device_mapping: Sequence[Any] | None = None,
        inputs: Sequence[Any] = (),
        shared: Sequence[Sequence[str]] = (),
        recompute: bool | str = False,
    ) -> None:
        self.accumulation = Accumulation.of(accumulation)
        self.schedule = PipelineSchedule.parse(schedule)
        self.device_mapping = device_mapping
        if not isinstance(recompute, bool | str) or recompute not in RECOMPUTE:
            raise OptionError(
                f"recompute is False, True, 'then' or 'interleaved'. Received: {recompute!r}."
            )
        self.recompute = recompute
        if not isinstance(inputs, tuple | list):
            raise OptionError(
                f"inputs is a tuple of what stage 0 gets before the element. Received: {inputs!r}."
            )
        self.inputs = tuple(inputs)
        self._weights = SharedWeights(shared)
        self.shared = self._weights.groups
        self.loss_fn = loss_fn
        # One function is cut when it is traced; a list is read, and planned, now.
        self.function = stages if callable(stages) else None
        self.stages: tuple[tuple[Stage, ...], ...] = ()
        if not callable(stages):
            self.stages = _read(stages)
            # Made and thrown away: a count or a mapping that does not fit is refused where it was
            # written.
            self.plan(tuple(map(len, self.stages)))
        elif loss_fn is not None:
            raise OptionError(
                "A pipeline made of one function has its loss in that function: it returns the loss, "
                "or (loss, aux). Received loss_fn as well. Call it inside."
            )

    @property
    def __name__(self) -> str:
        """The name of the function that computes the loss, for messages."""
        made = self.function or self.loss_fn or self.stages[-1][-1]
        return getattr(made, "__name__", "the pipeline")

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of members of each stage; empty if only tracing the function shows it."""
        return tuple(map(len, self.stages))

    def plan(self, sizes: tuple[int, ...], training: bool = True, count: int | None = None) -> Plan:
        """The plan of an execution of `count` microbatches, for stages of these sizes."""
        try:
            return plan(
                list(sizes),
                self.accumulation.microbatches if count is None else count,
                self.schedule,
                self.device_mapping,
                training,
            )
        except PlanError as error:
            # Errors of a plan use its name of the option; translate it to the name used here.
            raise PlanError(str(error).replace("microbatches=", "accumulation=")) from None

    def __repr__(self) -> str:
        names = [" + ".join(_stage_name(one) for one in stage) for stage in self.stages]
        stages = " | ".join(names) or f"{self.__name__}, cut at its boundaries"
        count, schedule = self.accumulation.microbatches, self.schedule.value
        bubble = f", bubble {100 * self.plan(self.sizes).bubble:.1f} %" if self.stages else ""
        return f"Pipeline({stages}; {count} microbatches, {schedule}{bubble})"

    def _repr_html_(self) -> str:
        import html

        text = html.escape(repr(self))
        return text + self.plan(self.sizes)._repr_html_() if self.stages else text

    def set_inputs(self, inputs: Sequence[Any]) -> None:
        """Replace the values that stage 0 gets before the element."""
        old = [(np.shape(x), jax.dtypes.result_type(x)) for x in jax.tree.leaves(self.inputs)]
        new = [(np.shape(x), jax.dtypes.result_type(x)) for x in jax.tree.leaves(tuple(inputs))]
        if jax.tree.structure(self.inputs) != jax.tree.structure(tuple(inputs)) or old != new:
            raise OptionError(
                f"Other inputs of a pipeline have the form of the first ones, {_forms(self.inputs)}. "
                f"Received: {_forms(tuple(inputs))}."
            )
        self.inputs = tuple(inputs)

    # -- the model as one function --------------------------------------------------------------

    def __call__(
        self, params: Tree, model_state: Tree, has_state: bool, batch: Tree, inputs: Sequence[Any]
    ) -> Any:
        """The result of a loss function, with boundaries between stages."""
        if self.function is not None:
            first = (self.tie(params), model_state) if has_state else (self.tie(params),)
            return call_with_element(self.function, (*first, *inputs), batch)
        result, after = self.outputs(params, model_state, has_state, batch, inputs)
        if self.loss_fn is not None:
            values = result if isinstance(result, tuple) else (result,)
            _check_takes(self.loss_fn, values, len(self.stages) - 1)
            result = self.loss_fn(*values)
        if not has_state:
            return result
        # A pair is always (loss, aux), as for a trainer's loss function.
        loss, aux = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
        return loss, (after, aux)

    def outputs(
        self, params: Tree, model_state: Tree, has_state: bool, batch: Tree, inputs: Sequence[Any]
    ) -> tuple[Any, Any]:
        """The result of the last stage, and the next model state."""
        if self.function is not None:
            raise PipelineError(
                "A pipeline made of one function returns a loss; what else is wanted of it is "
                "predicted with a function that has the same tr.stage_boundary marks: "
                "trainer.predict(dataset, fn)."
            )
        params = self._by_stage("params", self.tie(params))
        states = self._by_stage("model_state", model_state) if has_state else None
        values: tuple[Any, ...] = ()
        after: list[Any] = []
        for number, members in enumerate(self.stages):
            if number:
                values = boundary(values, NEXT)
            outputs: list[Any] = []
            new: list[Any] = []
            for which, stage in enumerate(members):
                if which and number:
                    values = boundary(values, BESIDE)
                # The first stage has no values yet, so the boundary between its members marks the
                # element.
                elif which:
                    batch = boundary(batch, BESIDE)
                own = [_member(params, number, which, members)]
                if states is not None:
                    own.append(_member(states, number, which, members))
                made = self._call(number, which, own, values, batch, inputs)
                if states is not None:
                    made, state = _with_state(made, number, stage)
                    new.append(state)
                outputs.extend(made if isinstance(made, tuple | list) else [made])
            values = tuple(outputs)
            after.append(new[0] if len(members) == 1 and new else new)
        result = values[0] if len(values) == 1 else values
        # The loop carries the model state, so it must keep its type: a list stays a list.
        return result, type(model_state)(after) if has_state else None

    def _call(
        self,
        number: int,
        which: int,
        own: list[Any],
        values: Tree,
        batch: Tree,
        inputs: Sequence[Any],
    ) -> Any:
        stage = self.stages[number][which]
        with jax.named_scope(
            f"stage{number}" + (f"_{which}" if len(self.stages[number]) > 1 else "")
        ):
            if number == 0:
                return call_with_element(stage, (*own, *inputs), batch)
            if (problem := _misfit(stage, [*own, *values])) is not None:
                raise PipelineError(
                    f"A stage takes what the stage before it returns. Stage {number} "
                    f"({_name(stage)}) cannot be called with {len(own)} argument(s) of its own and "
                    f"the {len(values)} value(s) from stage {number - 1}, {_forms(values)}: {problem}. "
                    f"Change its parameters, or what stage {number - 1} returns."
                )
            try:
                return stage(*own, *values)
            except (TypeError, ValueError) as error:
                # A boundary inside the stage, or a nested check, has said already what is wrong.
                if isinstance(error, PipelineError):
                    raise
                raise PipelineError(
                    f"Stage {number} ({_name(stage)}) failed on what stage {number - 1} returned, "
                    f"{_forms(values)}: {error}"
                ) from error

    def _by_stage(self, what: str, tree: Tree) -> Sequence[Any]:
        if not isinstance(tree, tuple | list) or len(tree) != len(self.stages):
            found = f"{len(tree)}" if isinstance(tree, tuple | list) else f"a {type(tree).__name__}"
            raise PipelineError(
                f"{what} of a pipeline is a list with an entry for each stage. There are "
                f"{len(self.stages)} stages. Received: {found}."
            )
        return tree

    # -- weights of several stages --------------------------------------------------------------

    def untie(self, params: Tree) -> Tree:
        """The parameters, each shared weight in its first place only."""
        return self._weights.untie(params)

    def tie(self, params: Tree) -> Tree:
        """The parameters with every shared weight in all its places."""
        return self._weights.tie(params)


def _read(stages: object) -> tuple[tuple[Stage, ...], ...]:
    if not isinstance(stages, tuple | list):
        raise OptionError(
            f"stages is a list of functions, or one function with tr.stage_boundary in it. "
            f"Received: {stages!r}."
        )
    if len(stages) < 2:
        raise PipelineError(
            f"A pipeline has at least two stages. Received: {len(stages)}. Without a pipeline, give "
            f"the loss function to tr.Trainer."
        )
    found = tuple(tuple(s) if isinstance(s, tuple | list) else (s,) for s in stages)
    for number, members in enumerate(found):
        if not members or not all(map(callable, members)):
            raise OptionError(
                f"A stage is a function, or a list of functions that run at the same time. Stage "
                f"{number} is {stages[number]!r}."
            )
    return found


def _stage_name(stage: object) -> str:
    return getattr(stage, "__name__", type(stage).__name__)


def _member(tree: Sequence[Any], number: int, which: int, members: Sequence[Stage]) -> Any:
    if len(members) == 1:
        return tree[number]
    part = tree[number]
    if not isinstance(part, tuple | list) or len(part) != len(members):
        raise PipelineError(
            f"Stage {number} has {len(members)} concurrent members, so its entry is a list of as "
            f"many. Received: {jax.tree.structure(part)}."
        )
    return part[which]


def _check_takes(loss_fn: Callable[..., Any], values: Sequence[Any], last: int) -> None:
    if (problem := _misfit(loss_fn, values)) is not None:
        raise PipelineError(
            f"The loss function takes what the last stage returns. {_name(loss_fn)} cannot be called "
            f"with the {len(values)} value(s) from stage {last}, {_forms(tuple(values))}: {problem}. "
            f"Change its parameters, or what stage {last} returns."
        )


def _misfit(function: Callable[..., Any], args: Sequence[Any]) -> TypeError | None:
    """Why a function does not take these arguments; None if it does, or has no signature."""
    # Bound before the call: a TypeError from inside the function would look like wrong arguments.
    try:
        inspect.signature(function).bind(*args)
    except ValueError:  # no signature: the call itself shows whether they fit
        return None
    except TypeError as error:
        return error
    return None


def _with_state(made: Tree, number: int, stage: Stage) -> tuple[Any, Any]:
    if not isinstance(made, tuple) or len(made) != 2:
        raise PipelineError(
            f"With a model state, a stage returns (outputs, new_state). Stage {number} "
            f"({_name(stage)}) returned {_forms(made)}."
        )
    return made


def _name(stage: object) -> str:
    return getattr(stage, "__name__", repr(stage))


def _forms(values: Tree) -> str:
    def one(value: object) -> str:
        shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
        return type(value).__name__ if shape is None else f"{dtype}{list(shape)}"

    return str(jax.tree.map(one, values)).replace("'", "")
