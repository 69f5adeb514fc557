"""Gradients of a value that has been computed, as programs of the original ask for them.

`optimizer.minimize(loss)` gets a tensor, not a function. While a program is traced, the question is an
equation, `gradients`; when the traced equations are run, those between the variables and the loss
become the function that is differentiated. They run once: their results are what everything after them
uses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tailrace.base.array_like import TensorLike
from tailrace.base.trees import Tree
from tailrace.compat.arguments import VariableLike
from tailrace.compat.ipu.errors import IPUTypeError
from tailrace.compat.ipu.graph.capture_context import active
from tailrace.compat.ipu.graph.state import inside, is_variable, value_of
from tailrace.errors import ProgramError
from tailrace.jaxprs import internals
from tailrace.jaxprs.control import programs_in
from tailrace.jaxprs.internals import Atom, ClosedJaxpr, JaxprEqn, Primitive, Var, variables
from tailrace.jaxprs.marks import Tag, mark
from tailrace.jaxprs.operations import name_of
from tailrace.jaxprs.own_equations import is_made_by, is_mark
from tailrace.jaxprs.stretches import bound, made_by, needed_for, results_of, run

# It has no lowering: a question that `evaluate` did not answer fails to compile, rather than
# silently computing something else.
_gradients_p = Primitive("ipu_gradients")
_gradients_p.multiple_results = True
_gradients_p.def_abstract_eval(
    lambda loss, *at: [internals.ShapedArray(value.shape, value.dtype) for value in at]
)


def gradients(loss: TensorLike, variables: Sequence[Any]) -> list[Any]:
    """The gradient of `loss`, a value of the program, in each of the variables.

    Args:
        loss: a float scalar, or an array, whose sum is used.
        variables: variables of Keras or `Variable`s; or values of the program.

    Raises:
        IPUTypeError: the loss is not a float.
    """
    inside("a gradient")
    loss = jnp.asarray(loss)
    if not jnp.issubdtype(loss.dtype, jnp.floating):
        raise IPUTypeError(f"A loss is a float. Received: {loss.dtype}{list(loss.shape)}.")
    context = active()
    # A captured gradient is the gradient with respect to a zero that was added at that place.
    zeros = [zero for each in context.zeros.values() for zero in each] if context else []
    # Only noted as an equation: which equations are between the sources and the loss is known when
    # the whole function has been traced (`evaluate`).
    found = _gradients_p.bind(loss, *map(_value, variables), *zeros)
    if context:
        context.filled(found[len(variables) :])
    return found[: len(variables)]


def _value(source: VariableLike) -> Any:
    return jnp.asarray(value_of(source) if is_variable(source) else source)


def watched_zero(value: TensorLike) -> Any:
    """A zero of the shape of `value` that a gradient can be asked in."""
    zeros = jnp.zeros(value.shape, value.dtype)
    return mark(zeros, Tag("captured"))  # a separate equation, so that it is a value of the trace


class GradientTape:
    """Gradients with TensorFlow 2's interface, inside a program; it replaces `tf.GradientTape` there.

    Everything in a program can be differentiated: the block itself does nothing. `watch` takes
    variables only. A source that the target does not depend on has a gradient of zeros.

    Args:
        persistent: whether it may be asked more than once; it always may.
        watch_accessed_variables: without effect: all variables can be differentiated.

    >>> from tailrace.compat import ipu
    >>> w = ipu.Variable(3.0, name="w")
    >>> def step():
    ...     with ipu.GradientTape() as tape:
    ...         loss = w * w
    ...     return tape.gradient(loss, w)
    >>> ipu.ipu_compiler.compile(step)()[0].item()
    6.0
    """

    def __init__(self, persistent: bool = False, watch_accessed_variables: bool = True) -> None:
        self.persistent = persistent
        self.watch_accessed_variables = watch_accessed_variables
        self.watched: list[Any] = []

    def __enter__(self) -> GradientTape:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def watch(self, variable: VariableLike) -> None:
        """Name a variable that `watched_variables` then returns.

        Args:
            variable: the variable.

        Raises:
            IPUTypeError: it is not a variable.
        """
        if not is_variable(variable):
            raise IPUTypeError(
                f"A tape watches variables. Received: {type(variable).__name__}. For the gradient in "
                f"another value, use jax.grad on a function of it."
            )
        self.watched.append(variable)

    def watched_variables(self) -> tuple[Any, ...]:
        """The variables watched: those named, or else all trainable ones touched so far."""
        return tuple(self.watched or trainable_so_far())

    def gradient(self, target: TensorLike, sources: Tree) -> Any:
        """The gradient of `target` with respect to `sources`.

        Args:
            target: a value of the program: a float scalar, or an array, whose sum is used.
            sources: one variable, or a list of them.

        Raises:
            IPUTypeError: the target is not a float.
            ProgramError: it is called outside a program.
        """
        alone = is_variable(sources)
        found = gradients(target, [sources] if alone else list(sources))
        return found[0] if alone else found


def trainable_so_far() -> list[Any]:
    """The trainable variables that the program has touched so far."""
    return [v for v in inside("a gradient").seen.values() if getattr(v, "trainable", False)]


# -- running what was traced --------------------------------------------------------------------


def evaluate(closed: ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
    """The results of a traced function, with its questions for gradients answered."""
    jaxpr = closed.jaxpr
    # First, so that nothing has run when a program is refused.
    for eqn in jaxpr.eqns:
        _refuse_hidden(eqn)
    known = bound(jaxpr, closed.consts, args)
    done: list[JaxprEqn] = []
    waiting = list(jaxpr.eqns)
    while waiting:
        asked = next((i for i, eqn in enumerate(waiting) if is_made_by(eqn, _gradients_p)), None)
        if asked is None:
            run(waiting, known)
            break
        # Questions are answered in order: a later loss may depend on an earlier gradient.
        _answer(done, waiting[:asked], waiting[asked], known)
        done += waiting[: asked + 1]
        waiting = waiting[asked + 1 :]
    return results_of(known, jaxpr.outvars)


def _answer(
    done: list[JaxprEqn], before: list[JaxprEqn], question: JaxprEqn, known: dict[Any, Any]
) -> None:
    """Run the equations before a question, those on the way to the loss as one function.

    Args:
        done: equations that have run, for questions before this one. Those of them on the way are run
            once more, inside of the function, and what they send out is not sent again.
        before: those between the question before this one and this one.
        question: what is asked.
        known: the values of variables; filled.
    """
    loss, *at = question.invars
    # A variable may be named twice, and a literal has no gradient.
    free = [var for var in dict.fromkeys(at) if isinstance(var, Var)]
    whole = _on_the_way([*done, *before], free, loss)
    ran = {id(eqn) for eqn in done}
    old = [eqn for eqn in whole if id(eqn) in ran]
    way = [eqn for eqn in whole if id(eqn) not in ran]
    made = made_by(way)
    first, apart = needed_for(before, free), {id(eqn) for eqn in way}
    run(first, known)
    apart.update(map(id, first))
    # What depends on results of the way must wait for it; everything else runs now, once, so that
    # its effects (feeds, prints) keep their order and are not differentiated.
    late, rest = set(made), []
    for eqn in before:
        if id(eqn) in apart:
            continue
        if any(var in late for var in variables(eqn.invars)):
            late.update(eqn.outvars)
            rest.append(eqn)
        else:
            run([eqn], known)

    def forward(values: Tree) -> Any:
        # A copy: tracers of `jax.grad` must not stay in `known`.
        local = known | dict(zip(free, values, strict=True))
        _run_again(old, local, done)
        run(way, local)
        return jnp.sum(internals.value_of(local, loss)), [local[var] for var in made]

    # The forward results leave as `aux`: the equations of the way are not evaluated a second time.
    grads, values = jax.grad(forward, has_aux=True)([known[var] for var in free])
    known.update(zip(made, values, strict=True))
    run(rest, known)
    _give(question, free, grads, known)


def _give(question: JaxprEqn, free: list[Any], grads: Tree, known: dict[Any, Any]) -> None:
    """Write the answer to a question."""
    for var, out in zip(question.invars[1:], question.outvars, strict=True):
        known[out] = grads[free.index(var)] if isinstance(var, Var) else jnp.zeros_like(var.val)


def _run_again(equations: list[JaxprEqn], known: dict[Any, Any], history: list[JaxprEqn]) -> None:
    """Run equations that have run before: nothing is sent again, and questions are asked again."""
    for eqn in equations:
        # A mark is an identity. Passing its value on without it keeps outfeeds from sending twice.
        if is_mark(eqn):
            values = [internals.value_of(known, var) for var in eqn.invars]
            known.update(zip(eqn.outvars, values, strict=True))
        elif not is_made_by(eqn, _gradients_p):
            run([eqn], known)
        else:
            loss, *at = eqn.invars
            free = [var for var in dict.fromkeys(at) if isinstance(var, Var)]
            earlier = history[: next(i for i, one in enumerate(history) if one is eqn)]
            way = _on_the_way(earlier, free, loss)

            def inner(
                values: Tree,
                way: list[JaxprEqn] = way,
                free: list[Var] = free,
                loss: TensorLike = loss,
            ) -> Any:
                local = known | dict(zip(free, values, strict=True))
                _run_again(way, local, history)
                return jnp.sum(internals.value_of(local, loss))

            _give(eqn, free, jax.grad(inner)([known[var] for var in free]), known)


def _refuse_hidden(eqn: JaxprEqn) -> None:
    """Refuse a question inside of an equation, from where the way to the loss cannot be seen."""
    for inner in programs_in(eqn):
        for each in inner.eqns:
            if is_made_by(each, _gradients_p):
                raise ProgramError(
                    f"A gradient is asked for inside of {name_of(eqn)!r}. Ask for it in the "
                    f"body of the loop or the function itself: remove the jax.jit around it, or "
                    f"use jax.grad on a function there."
                )
            _refuse_hidden(each)


def _on_the_way(equations: list[JaxprEqn], start: list[Any], end: Atom) -> list[JaxprEqn]:
    """The equations that compute `end` out of `start`, in order."""
    touched, forward = set(start), []
    for eqn in equations:
        # The equation that made a source is before it: gradients with respect to a value, not its past.
        begins_here = any(var in start for var in eqn.outvars)
        if not begins_here and any(var in touched for var in variables(eqn.invars)):
            touched.update(eqn.outvars)
            forward.append(eqn)
    return needed_for(forward, [end])
