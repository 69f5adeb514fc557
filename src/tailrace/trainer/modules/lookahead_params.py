"""`optax.LookaheadParams`: fast parameters, which are trained, and slow ones, which are used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tailrace.base.trees import Tree
from tailrace.program.in_program import training
from tailrace.program.step.update_rule import Optimizer
from tailrace.trainer.modules.binding import Binding, no_module


class LookaheadBinding(Binding):
    """The loss is that of the fast parameters; `evaluate` and `predict` use the slow ones."""

    returns_state = True

    def __init__(self, params: Any, model_state: Tree) -> None:
        self.params, self.model_state = params, model_state

    def opened(self, params: Any, state: Tree) -> tuple[Any, ...]:
        """One kind of parameters, and the state if there is one."""
        chosen = params.fast if training() else params.slow
        return (chosen,) if self.model_state is None else (chosen, state)

    def stored(self, opened: tuple[Any, ...], returned: Tree, before: Tree) -> Any:
        """What the function returned."""
        return returned

    def model(self, params: Tree, state: Tree) -> Any:
        """There is none."""
        raise no_module()

    def optimizer(self, optimizer: Optimizer) -> Any:
        """It expects the gradients of the fast parameters alone; the loss has none in the others."""
        import optax

        update_of: Callable[..., Any] = getattr(optimizer, "update")  # noqa: B009

        def update(updates: Any, state: Tree, params: Tree = None) -> Any:
            return update_of(updates.fast, state, params)

        return optax.GradientTransformation(optimizer.init, update)
