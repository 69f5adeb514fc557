"""Loops that run on the device: `repeat` and `while_loop`, with or without an infeed."""

# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnnecessaryIsInstance=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tailrace.base.trees import Tree
from tailrace.errors import ProgramError
from tailrace.feeds.elements import call_with_element
from tailrace.feeds.feed import Feed
from tailrace.jaxprs.array_trees import check_arrays
from tailrace.jaxprs.internals import Tracer
from tailrace.jaxprs.marks import ProgramTrace, Tag, current_trace, dequeue, inside_loop, mark

_NOTHING = object()


def repeat(
    n: int | jax.Array,
    body: Callable[..., Any],
    inputs: Tree = _NOTHING,
    infeed: Feed | None = None,
) -> Tree:
    """Run `body` n times on the device.

    Args:
        n: the number of iterations. An integer; without an infeed it may also be a traced value.
        body: called as `body(inputs, *element)`, returns the next `inputs`. Without `inputs` it is
            called as `body(*element)` and returns nothing.
        inputs: one tree of arrays, carried from iteration to iteration.
        infeed: the queue that each iteration takes an element from.

    Returns:
        The result of the last iteration.

    Raises:
        ProgramError: `n` is not a number of at least 0, or the body does not fit the values it carries.

    Example:
        >>> import tailrace as tr
        >>> infeed = tr.InfeedQueue([1.0, 2.0, 3.0])
        >>> total = tr.compile(lambda t: tr.repeat(3, lambda t, x: t + x, t, infeed=infeed))
        >>> print(total(10.0))
        16.0
    """
    return repeat_with(call_with_element, n, body, inputs, infeed)


def repeat_with(
    call: Callable[..., Any],
    n: int | jax.Array,
    body: Callable[..., Any],
    inputs: Tree = _NOTHING,
    infeed: Feed | None = None,
) -> Tree:
    """`repeat`, where `call(body, carried, element)` passes the element to the body."""
    trace = current_trace("tr.repeat")
    carries = inputs is not _NOTHING
    if carries:
        check_arrays("tr.repeat carries", inputs)
    carry = jax.tree.map(jnp.asarray, inputs) if carries else None
    # A concrete array is as good as an integer, and gives a loop that can be differentiated.
    if isinstance(n, jax.Array) and not isinstance(n, Tracer):
        n = int(n)
    if isinstance(n, Tracer):
        _need_static(n, infeed)
        # Not tagged with a length: it is found again as a loop of unknown length.
        return lax.fori_loop(0, n, _loop_body(trace, call, body, None, None, carries), carry)
    if not hasattr(n, "__index__") or isinstance(n, bool) or n.__index__() < 0:
        raise ProgramError(f"tr.repeat runs a body n times, n >= 0. Received: n={n!r}.")
    n = n.__index__()
    one_pass = _loop_body(trace, call, body, infeed, n, carries)
    # The counter is scanned, not carried: a piece of the loop then only needs other rows of it.
    carry, _ = lax.scan(lambda c, i: (one_pass(i, c), None), carry, jnp.arange(n, dtype=jnp.int32))
    return carry


def while_loop(
    condition: Callable[[Any], Any],
    body: Callable[..., Any],
    inputs: Tree,
    infeed: Feed | None = None,
    maximum_iterations: int | None = None,
) -> Tree:
    """Run `body` on the device while `condition(inputs)` holds.

    Args:
        condition: called as `condition(inputs)`, returns a boolean scalar.
        body: called as `body(inputs, *element)`, returns the next `inputs`.
        inputs: one tree of arrays, carried from iteration to iteration.
        infeed: the queue that each iteration takes an element from. Unread elements go back to it.
        maximum_iterations: an upper bound on the iterations. Required with an infeed, because that many
            elements must be ready before the execution starts, and with an outfeed inside.

    Returns:
        The result of the last iteration, or `inputs` if there was none.

    Raises:
        ProgramError: an infeed without `maximum_iterations`, a condition that is not one boolean, or a
            body that does not fit.

    Example:
        >>> import tailrace as tr
        >>> print(tr.compile(lambda x: tr.while_loop(lambda x: x < 100, lambda x: 2 * x, x))(3))
        192
    """
    trace = current_trace("tr.while_loop")
    check_arrays("tr.while_loop carries", inputs)
    carry = jax.tree.map(jnp.asarray, inputs)
    if infeed is not None and maximum_iterations is None:
        raise ProgramError(
            "tr.while_loop with an infeed needs maximum_iterations=: an execution starts when all "
            "elements that it may read are there. Received: maximum_iterations=None."
        )
    if maximum_iterations is not None and (
        not isinstance(maximum_iterations, int) or maximum_iterations < 0
    ):
        raise ProgramError(
            f"maximum_iterations is an integer >= 0. Received: {maximum_iterations!r}."
        )
    if infeed is not None and trace.loops:
        raise ProgramError(
            "tr.while_loop with an infeed must be at the top of a program, not inside another loop: "
            "the number of elements it reads would not be known before the execution. Use tr.repeat "
            "inside, or feed the outer loop."
        )
    one_pass = _loop_body(trace, call_with_element, body, infeed, maximum_iterations, True)

    def continues(state: Tree) -> jax.Array:
        i, carry = state
        wanted = jnp.asarray(condition(carry))
        if wanted.shape != () or wanted.dtype != jnp.bool_:
            raise ProgramError(
                f"The condition of tr.while_loop returns one boolean. "
                f"Received: {wanted.dtype}{list(wanted.shape)}."
            )
        if maximum_iterations is None:
            return wanted
        return jnp.logical_and(i < maximum_iterations, wanted)

    _, carry = lax.while_loop(continues, lambda s: (s[0] + 1, one_pass(*s)), (jnp.int32(0), carry))
    return carry


def _loop_body(
    trace: ProgramTrace,
    call: Callable[..., Any],
    body: Callable[..., Any],
    infeed: Feed | None,
    length: int | None,
    carries: bool,
) -> Callable[[Any, Any], Any]:
    """`(counter, carry) -> carry`, with the loop's mark, its element and its checks."""
    if infeed is not None:
        if not isinstance(infeed, Feed):
            raise ProgramError(
                f"infeed must be a tr.InfeedQueue. Received: {type(infeed).__name__}. "
                f"Wrap the dataset: tr.InfeedQueue(dataset)."
            )
        # Already here: when the program runs, elements would have been taken for the wrong number.
        infeed.check_replicas(trace.replicas)

    def one_pass(counter: jax.Array, state: Tree) -> Tree:
        with inside_loop(trace):
            # The counter is marked, because it is in the loop whatever the body does; the mark makes
            # the loop ours.
            counter = mark(counter, Tag("loop", payload=length))
            first = (state,) if carries else ()
            if infeed is None:
                after = body(*first)
            else:
                spec = infeed.spec()
                after = call(body, first, spec.element(dequeue(counter, infeed, spec.leaves)))
        # Checked by us: JAX's own message speaks of a scan that the user did not write.
        return _same_form(state, after)

    return one_pass


def whole(body: Callable[..., Any], first: tuple[Any, ...], element: Tree) -> Any:
    """Pass an element as one argument, whatever its structure (for `repeat_with`)."""
    return body(*first, element)


def _need_static(n: object, infeed: object) -> None:
    if infeed is not None:
        raise ProgramError(
            "tr.repeat with an infeed needs a number known when the program is compiled: an "
            f"execution starts when all its elements are there. Received: n={n}. Give an integer, "
            "or use tr.while_loop with maximum_iterations."
        )


def _same_form(before: Tree, after: Tree) -> Tree:
    """A body's result, checked to have the structure, shapes and dtypes of its input."""
    old, structure = jax.tree_util.tree_flatten_with_path(before)
    new, found = jax.tree.flatten(after)
    if structure != found:
        raise ProgramError(
            f"The body of a loop returns what it carries, in the same structure. It got {structure} "
            f"and returned {found}. Return the carried value whole, and nothing else (results leave "
            f"through an outfeed)."
        )
    check_arrays("The body of a loop returns", after)
    for (path, was), now in zip(old, new, strict=True):
        now = jnp.asarray(now)
        if was.shape != now.shape or was.dtype != now.dtype:
            where = jax.tree_util.keystr(path) or "the carried value"
            raise ProgramError(
                f"The body of a loop returns the shapes and dtypes that it got. {where} was "
                f"{was.dtype}{list(was.shape)} and came back as {now.dtype}{list(now.shape)}. "
                f"Cast or reshape it in the body, or start the loop with the other form."
            )
    return after
