"""`for` and `while` over values of the device, as loops of the program."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from tailrace.base.array_like import TensorLike
from tailrace.base.trees import Tree
from tailrace.compat.ipu import loops
from tailrace.compat.ipu.graph.state import kept
from tailrace.compat.tensorflow.control.symbols import (
    MISSING,
    Split,
    Symbols,
    boolean,
    same_form,
    split,
    zeros_of,
)
from tailrace.errors import ProgramError


class Range:
    """`tf.range` whose length is a value of the device: it can be iterated, and nothing else."""

    def __init__(self, start: TensorLike, limit: TensorLike, delta: TensorLike) -> None:
        self.start, self.delta = start, delta
        # Rounded up: floor division of the negative, which holds for both signs of delta.
        self.length = jnp.maximum(0, -((start - limit) // delta))

    def __getitem__(self, index: TensorLike) -> Any:
        return self.start + index * self.delta

    def __iter__(self) -> Iterator[Any]:
        # Python would take items without end: a value of the device never raises an IndexError.
        raise ProgramError(
            "A `for` over tf.range(n), where n is a value of the device, was left to Python, which "
            "does not know n: the function is not rewritten (autograph=False, do_not_convert, or a "
            "source that cannot be read). Let it be rewritten, or use ipu.loops.repeat, tf.while_loop."
        )


def for_loop(
    items: jax.Array | Range,
    body: Callable[[Any], None],
    symbols: Symbols,
    again: Callable[[], Any] | None,
) -> None:
    """Run `body` for each item, in the program.

    Args:
        items: an array, iterated along its first axis, or a `Range`.
        body: changes the symbols.
        symbols: what it changes.
        again: whether there is another pass, asked before each; None: always.
    """
    length = items.length if isinstance(items, Range) else items.shape[0]
    loop = _Loop(symbols, "A loop")

    def one_pass(index: TensorLike, *arrays: Any) -> Any:
        # Names are those of the rewritten function: they must hold this pass's values before its
        # code runs.
        loop.enter(arrays)
        body(items[index])
        return index + 1, *loop.left()

    start = [jnp.int32(0), *loop.arrays]
    if again is None:
        after = loops.repeat(length, one_pass, start)
    else:
        # `break` became a name that the body changes; `again` reads it before each pass.
        def wanted(index: TensorLike, *arrays: Any) -> Any:
            loop.enter(arrays)
            return boolean(again()) & (index < length)

        after = loops.while_loop(wanted, one_pass, start)
    loop.finish(after[1:] if isinstance(after, list) else [])


def while_loop(test: Callable[[], Any], body: Callable[[], None], symbols: Symbols) -> None:
    """Run `body` for as long as `test` holds, in the program."""
    loop = _Loop(symbols, "A while loop")

    def one_pass(*arrays: Any) -> Any:
        loop.enter(arrays)
        body()
        return loop.left()

    def wanted(*arrays: Any) -> Any:
        loop.enter(arrays)
        return boolean(test())

    after = loops.while_loop(wanted, one_pass, loop.arrays)
    loop.finish(after if isinstance(after, list) else [after] if loop.arrays else [])


class _Loop:
    """The names that a loop changes, before, in and after its passes.

    A name that has no value before the loop gets one in its body; what form that has is known from the
    trace in which the program is looked through, and the loop begins with zeros of that form.
    """

    def __init__(self, symbols: Symbols, what: str) -> None:
        self._symbols, self._what = symbols, what
        self._undefined = list(symbols.read())
        self._forms: dict[Any, Any] = kept()  # from one trace of the program to the next
        values = symbols.values()
        for number, value in enumerate(values):
            if value is MISSING and number in self._forms:
                values[number] = jax.tree.map(zeros_of, self._forms[number])
        self._before = split(values)
        self._after: Split | None = None

    @property
    def arrays(self) -> list[Any]:
        """What the loop carries."""
        return self._before.arrays

    def enter(self, arrays: Tree) -> None:
        """The values at the beginning of a pass."""
        self._symbols.put(self._before.joined(arrays), self._undefined)

    def left(self) -> list[Any]:
        """The values at the end of a pass, of the form that they had."""
        values = self._symbols.values()
        started = self._before.joined(self._before.arrays)
        for number, (before, value) in enumerate(zip(started, values, strict=True)):
            if before is MISSING and value is not MISSING:
                one = split([value])
                # Only what is made of arrays: an object that first appears in a loop cannot be
                # carried.
                if one.arrays and all(each is None for each in one.kept):
                    self._forms[number] = jax.tree.map(
                        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype),
                        one.joined(one.arrays)[0],
                    )
                values[number] = MISSING  # carried from the next trace on
        found = split(values)
        same_form(self._before, found, self._symbols.names, self._what)
        return found.arrays

    def finish(self, arrays: Tree) -> None:
        """The values after the loop."""
        values = self._before.joined(arrays)
        for number, value in enumerate(values):
            if value is MISSING and number in self._forms:
                # Of a trace that is dropped.
                values[number] = jax.tree.map(zeros_of, self._forms[number])
        self._symbols.put(values, self._undefined)
