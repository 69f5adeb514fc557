"""The modules of a pipeline: one, whose function has boundaries in it, or one for each stage."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tailrace.base.trees import Tree
from tailrace.pipeline.pipeline import Pipeline
from tailrace.trainer.modules.binding import Binding, Function, Loss, Plain, is_pair


def pipeline_of_module(binding: Binding, pipeline: Pipeline) -> Pipeline:
    """A pipeline of one function, which is called with the module."""
    # A copy: the user may give the pipeline to another trainer, with another module.
    changed = copy.copy(pipeline)
    changed.function = Loss(binding, pipeline.function)  # type: ignore[arg-type]
    return changed


class StagesBinding(Binding):
    """A binding for each stage.

    Args:
        pipeline: the pipeline that the stages belong to.
        params: the module (or the parameters) of each stage.
        model_state: the state of each stage, where modules do not hold it.
        bind: finds the binding of one stage.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        params: Sequence[Any],
        model_state: Sequence[Any] | None,
        bind: Callable[[Any, Any], Binding],
    ) -> None:
        self._pipeline = pipeline
        # Flat in here, nested outside: a pipeline has a list for concurrent stages, and each member
        # has a binding.
        modules = list(self._flat(params))
        states = [None] * len(modules) if model_state is None else list(self._flat(model_state))
        self.bindings = list(map(bind, modules, states))
        self.params = self._nested([one.params for one in self.bindings])
        self._takes_state = model_state is not None
        if any(one.model_state is not None for one in self.bindings):
            # Stages without a state have an empty one, because a pipeline has one for all or for none.
            states = [() if one.model_state is None else one.model_state for one in self.bindings]
            self.model_state = self._nested(states)

    @property
    def are_modules(self) -> bool:
        """Whether any stage has a module."""
        return not all(isinstance(one, Plain) for one in self.bindings)

    def opened(self, params: Tree, state: Tree) -> tuple[Any, ...]:
        """The modules, and the states if they were given."""
        made = [one.opened(*both)[0] for one, *both in self._by_stage(params, state)]
        states = (self.shown_state(state),) if self._takes_state else ()
        return self._nested(made), *states

    def stored(self, opened: tuple[Any, ...], returned: Tree, before: Tree) -> Any:
        """Each stage has its own."""
        raise AssertionError

    def model(self, params: Tree, state: Tree) -> Any:
        """The modules; of a stage that has none, its parameters."""
        return self._nested(
            [
                own if isinstance(one, Plain) else one.model(own, after)
                for one, own, after in self._by_stage(params, state)
            ]
        )

    def shown_params(self, params: Tree) -> Any:
        """The parameters of all stages."""
        each = self._by_stage(params, None)
        return self._nested([one.shown_params(own) for one, own, _ in each])

    def shown_state(self, state: Tree) -> Any:
        """The states of all stages."""
        if state is None:
            return None
        return self._nested(
            [one.shown_state(s) for one, s in zip(self.bindings, self._flat(state), strict=True)]
        )

    def loss(self, fn: Callable[..., Any]) -> Any:
        """The pipeline, with stages that are called with their modules."""
        # The user's pipeline may be given to another trainer, with other modules.
        changed = copy.copy(self._pipeline)
        bindings = iter(self.bindings)
        changed.stages = tuple(
            tuple(
                Stage(next(bindings), stage, number == 0, self.model_state is not None)
                for stage in members
            )
            for number, members in enumerate(self._pipeline.stages)
        )
        return changed

    def _by_stage(self, params: Tree, state: Tree) -> Iterator[tuple[Binding, Any, Any]]:
        states = [None] * len(self.bindings) if state is None else self._flat(state)
        return zip(self.bindings, self._flat(params), states, strict=True)

    def _flat(self, tree: Sequence[Any]) -> Iterator[Any]:
        """The entries of all members, in order."""
        for members, entry in zip(self._pipeline.stages, tree, strict=True):
            yield from (entry,) if len(members) == 1 else entry

    def _nested(self, entries: Sequence[Any]) -> list[Any]:
        """The entries as a pipeline wants them: a list in the list for concurrent members."""
        left = iter(entries)
        return [
            next(left) if len(members) == 1 else [next(left) for _ in members]
            for members in self._pipeline.stages
        ]


class Stage(Function):
    """A stage of the user, called with its module.

    Args:
        binding: the binding of its module.
        fn: the stage.
        first: whether it gets the element of the dataset, or the outputs of the stage before.
        stateful: whether the pipeline has a model state.
    """

    def __init__(
        self, binding: Binding, fn: Callable[..., Any], first: bool, stateful: bool
    ) -> None:
        super().__init__(binding, fn)
        self.first, self.stateful = first, stateful

    def __call__(self, params: Tree, *rest: Any) -> Any:
        """Its outputs, with the new state if the pipeline has one."""
        before, values = (rest[0], rest[1:]) if self.stateful else (None, rest)
        binding = self.binding
        out, opened = self.called(params, before, values, whole_element=self.first)
        if not self.stateful:
            return out
        # Its empty state, unchanged: the pipeline wants one of every stage.
        if binding.model_state is None:
            return out, before
        if not binding.returns_state:
            return out, binding.stored(opened, None, before)
        if not is_pair(out):
            return out  # the pipeline says what is wrong with it
        outputs, returned = out
        return outputs, binding.stored(opened, returned, before)
