"""Optimizers of other libraries with the interface of the original.

An optimizer there has `compute_gradients(loss, var_list)`, `apply_gradients(grads_and_vars)` and
`minimize(loss)`. `as_optimizer` makes one from an optax transformation or a Keras optimizer; an object
with `apply_gradients` is used as it is.
"""

from __future__ import annotations

import contextvars
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tailrace.base.array_like import TensorLike
from tailrace.compat.arguments import GradientsAndVariables, OptimizerLike, VariableLike
from tailrace.compat.ipu.errors import IPUTypeError, IPUValueError
from tailrace.compat.ipu.graph.deferred import Deferred, Feed, Step, describing, evaluated
from tailrace.compat.ipu.graph.gradients import gradients, trainable_so_far
from tailrace.compat.ipu.graph.named_variables import slot, trainable_variables
from tailrace.compat.ipu.graph.operations import Operation
from tailrace.compat.ipu.graph.state import is_variable, kept, prepared, value_of
from tailrace.compat.ipu.graph.variables import Variable


class Computed:
    """Gradients computed elsewhere: Keras' `fit` computes them before it calls an optimizer."""

    def __init__(self, grads: Sequence[Any], variables: Sequence[Any]) -> None:
        self.variables = list(variables)
        self._grads = {id(v): g for v, g in zip(variables, grads, strict=True)}

    def of(self, variable: VariableLike) -> Any:
        """The gradient with respect to a variable; None if there is none."""
        return self._grads.get(id(variable))


computed: contextvars.ContextVar[Computed | None] = contextvars.ContextVar(
    "ipu_computed_gradients", default=None
)


class Optimizer:
    """The interface of the original's optimizers; a subclass defines `apply_gradients`.

    Args:
        name: what it is called; None: the name of the class.

    >>> from tailrace.compat import ipu
    >>> class Descent(ipu.optimizers.Optimizer):
    ...     def apply_gradients(self, grads_and_vars, global_step=None, name=None):
    ...         for grad, var in grads_and_vars:
    ...             var.assign_sub(0.25 * grad)
    >>> w = ipu.Variable(2.0, name="w")
    >>> ipu.ipu_compiler.compile(lambda: Descent().minimize(w * w))()
    >>> w.numpy().item()
    1.0
    """

    def __init__(self, name: str | None = None) -> None:
        self._name = name or type(self).__name__

    def __init_subclass__(cls, **options: Any) -> None:
        """Let `apply_gradients` of every optimizer take gradients that a session computes."""
        super().__init_subclass__(**options)
        # Wrapped in each class that defines it: programs override `apply_gradients`, and may not
        # call `super()`.
        if "apply_gradients" in vars(cls):
            cls.apply_gradients = _applied(vars(cls)["apply_gradients"])

    def get_name(self) -> str:
        """The name of the optimizer."""
        return self._name

    def compute_gradients(
        self, loss: TensorLike, var_list: Sequence[VariableLike] | None = None, **_: Any
    ) -> list[tuple[Any, Any]]:
        """(gradient, variable) for each variable.

        Args:
            loss: the loss, a value of the program.
            var_list: the variables; None: all trainable ones touched so far.
            **_: without effect.

        Raises:
            IPUValueError: there are no variables.
            IPUTypeError: the loss is not a float.
        """
        if (given := computed.get()) is not None:
            variables = given.variables if var_list is None else list(var_list)
            return [(given.of(variable), variable) for variable in variables]
        if isinstance(loss, Deferred):  # it has a value when a session runs
            return _described(loss, var_list)
        variables = _variables(var_list)
        return list(zip(gradients(loss, variables), variables, strict=True))

    def apply_gradients(
        self,
        grads_and_vars: GradientsAndVariables,
        global_step: VariableLike = None,
        name: str | None = None,
    ) -> Any:
        """Change the variables; returns an operation.

        Args:
            grads_and_vars: pairs of a gradient, or None, and its variable.
            global_step: a variable that counts steps; `minimize` counts it.
            name: what the operation is called.
        """
        raise NotImplementedError(f"{type(self).__name__} does not say how to apply gradients.")

    def minimize(
        self,
        loss: TensorLike,
        global_step: VariableLike = None,
        var_list: Sequence[VariableLike] | None = None,
        name: str | None = None,
        **kwargs: Any,
    ) -> Any:
        """Compute the gradients of a loss, a value or a function that returns it, and apply them.

        Args:
            loss: the loss.
            global_step: a variable to which one is added.
            var_list: the variables; None: all trainable ones touched so far.
            name: what the operation is called.
            **kwargs: for `compute_gradients`.
        """
        if isinstance(loss, Deferred):  # it has a value when a session runs

            def minimize(feed: Feed) -> Any:
                return self.minimize(loss.value(feed), global_step, var_list, name, **kwargs)

            return Step(minimize, name or "minimize")
        # TensorFlow 2 passes a function, TensorFlow 1 a value.
        loss = loss() if callable(loss) and not is_variable(loss) else loss
        pairs = self.compute_gradients(loss, var_list, **kwargs)
        self.apply_gradients(pairs, global_step, name)
        return Operation(name or self.get_name())

    def variables(self) -> list[Any]:
        """The variables that the optimizer keeps for itself."""
        return []

    def get_slot_names(self) -> list[str]:
        """The kinds of variables it keeps for each variable that it changes."""
        return []

    def get_slot(self, var: VariableLike, name: str) -> Any:
        """The variable of a kind that it keeps for `var`, or None.

        Args:
            var: a variable.
            name: the kind.
        """
        del var, name
        return None


def _applied(plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def apply_gradients(
        self: Optimizer, grads_and_vars: GradientsAndVariables, *args: Any, **kwargs: Any
    ) -> Any:
        pairs = list(grads_and_vars)
        if describing() or any(isinstance(grad, Deferred) for grad, _ in pairs):

            def apply(feed: Feed) -> Any:
                return self.apply_gradients(evaluated(pairs, feed), *args, **kwargs)

            return Step(apply, "apply_gradients")
        # Wrappers call `apply_gradients` of what they wrap: the step is counted once, by the
        # outermost.
        outermost = not _applying.get()
        token = _applying.set(True)
        try:
            out = plain(self, pairs, *args, **kwargs)
        finally:
            _applying.reset(token)
        step = kwargs.get("global_step", args[0] if args else None)
        if outermost and is_variable(step):
            count_step(step)
        return out

    return apply_gradients


_applying: contextvars.ContextVar[bool] = contextvars.ContextVar("ipu_applying", default=False)
"""Whether an optimizer is applying gradients: those that it wraps do not count the step again."""


def _described(loss: Deferred, var_list: Sequence[VariableLike] | None) -> list[tuple[Any, Any]]:
    """(gradient, variable), computed when a session runs; None: all trainable ones of the graph."""
    variables = _checked(trainable_variables() if var_list is None else var_list)
    # One step, of which each gradient is a part: the loss is differentiated once in a run.
    whole = Step(lambda feed: gradients(loss.value(feed), variables), "gradients", changes=False)
    return [(whole[number], variable) for number, variable in enumerate(variables)]


def count_step(global_step: VariableLike) -> None:
    """Add one to the variable that counts steps, if there is one."""
    if global_step is not None:
        global_step.assign_add(jnp.ones((), global_step.dtype))


def _variables(var_list: Sequence[VariableLike] | None) -> list[Any]:
    return _checked(trainable_so_far() if var_list is None else var_list)


def _checked(variables: Sequence[VariableLike]) -> list[Any]:
    if not variables:
        raise IPUValueError("No variables to optimize.")
    return list(variables)


class OptaxOptimizer(Optimizer):
    """An optax transformation; its state is kept in variables.

    Args:
        transformation: the transformation.
        name: its name.
        init: makes the state, outside of the program; None: the transformation does.
    """

    def __init__(
        self,
        transformation: OptimizerLike,
        name: str | None = None,
        init: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        super().__init__(name or "optax")
        self.transformation, self._init = transformation, init
        self._states = kept()

    def apply_gradients(
        self,
        grads_and_vars: GradientsAndVariables,
        global_step: VariableLike = None,
        name: str | None = None,
    ) -> Operation:
        """One update of all the variables together."""
        import optax

        pairs = [(grad, var) for grad, var in grads_and_vars if grad is not None]
        variables = [var for _, var in pairs]
        slots, structure, _ = self.slots_of(variables)
        # Kept in variables, not in the optimizer: programs carry and checkpoint variables.
        state = jax.tree.unflatten(structure, [each.value() for each in slots])
        values = [jnp.asarray(value_of(var)) for var in variables]
        updates, state = self.transformation.update([grad for grad, _ in pairs], state, values)
        for each, value in zip(slots, jax.tree.leaves(state), strict=True):
            each.assign(value)
        after: Any = optax.apply_updates(values, updates)
        for var, value in zip(variables, after, strict=True):
            var.assign(value)
        return Operation(name or self.get_name())

    def slots_of(self, variables: Sequence[Any]) -> tuple[list[Variable], Any, Sequence[Any]]:
        """The optimizer's variables for these variables, and the tree that they form."""

        def make() -> Any:
            init = self._init or self.transformation.init
            state = init([jnp.asarray(value_of(var)) for var in variables])
            leaves, structure = jax.tree.flatten(state)
            slots = [slot(jnp.asarray(leaf)) for leaf in leaves]
            return slots, structure, variables  # kept, so that no other takes their identity

        return prepared(self._states, tuple(map(id, variables)), make)

    def variables(self) -> list[Any]:
        """Everything that the transformation keeps."""
        return [each for slots, _, _ in self._states.values() for each in slots]


class KerasOptimizer(Optimizer):
    """A Keras optimizer; it changes variables of Keras."""

    def __init__(self, optimizer: OptimizerLike) -> None:
        super().__init__(optimizer.name)
        self.optimizer = optimizer

    def apply_gradients(
        self,
        grads_and_vars: GradientsAndVariables,
        global_step: VariableLike = None,
        name: str | None = None,
    ) -> Operation:
        """The optimizer's own `apply_gradients`, overridden or not.

        Raises:
            IPUTypeError: a variable is not Keras' own.
        """
        # A variable that the loss does not depend on keeps its value; so does its state.
        pairs = [(grad, var) for grad, var in grads_and_vars if grad is not None]
        # Keras' optimizers write through Keras' scope, which does not know our own variables.
        for _, var in pairs:
            if isinstance(var, Variable):
                raise IPUTypeError(
                    f"A Keras optimizer changes variables of Keras. Received: {var!r}. Make it with "
                    f"keras.Variable, or use an optax optimizer."
                )
        self.build([var for _, var in pairs])
        self.optimizer.apply_gradients(pairs)
        return Operation(name or self.get_name())

    def build(self, variables: Sequence[Any]) -> None:
        """Let Keras make the optimizer's variables, which it cannot do inside of a program."""
        if not self.optimizer.built:
            # An empty dict: `built` says whether it was done.
            prepared({}, None, lambda: self.optimizer.build(list(variables)))

    def variables(self) -> list[Any]:
        """The optimizer's variables."""
        return list(self.optimizer.variables)


def is_keras_optimizer(opt: OptimizerLike) -> bool:
    """Whether `opt` is an optimizer of Keras."""
    keras = sys.modules.get("keras")
    return keras is not None and isinstance(opt, keras.optimizers.Optimizer)


def as_optimizer(opt: OptimizerLike) -> Any:
    """`opt` with the interface of the original.

    Raises:
        IPUTypeError: it is not an optimizer of a known kind.
    """
    if is_keras_optimizer(opt):
        return KerasOptimizer(opt)
    # Before optax: an object of the program's own may have `init` and `update` as well.
    if callable(getattr(opt, "apply_gradients", None)):
        return opt
    if callable(getattr(opt, "update", None)) and callable(getattr(opt, "init", None)):
        return OptaxOptimizer(opt)
    raise IPUTypeError(
        f"An optimizer is an optax transformation, a Keras optimizer, or an object with "
        f"apply_gradients(grads_and_vars). Received: {type(opt).__name__}."
    )
