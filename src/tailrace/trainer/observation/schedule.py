"""The values of a schedule of the learning rate, for the history.

An optimizer calls its schedule in the compiled program, with a scalar of the program: 0 ** -0.5 is Inf
there, and an error in Python. So it is called in a program here too: one for many steps, on the
host, which does not wait for the device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tailrace.base.messages import note_once
from tailrace.errors import OptionError

BLOCK = 256
"""The number of steps that are computed at once: for one alone, the call is what takes time."""


class Schedule:
    """A function of the step, evaluated as an optimizer does.

    Args:
        given: the function.

    >>> Schedule(lambda step: 0.5 * (step + 1)).values(3, 2).tolist()
    [2.0, 2.5]
    """

    def __init__(self, given: Callable[[Any], Any]) -> None:
        self._given, self._program = given, None
        self._block, self._known = -1, np.zeros(0)
        try:
            form: Any = jax.eval_shape(given, jax.ShapeDtypeStruct((), jnp.int32))
        except Exception as error:
            form = self._first_on_host(error)
        else:
            self._program = jax.jit(_of_block(given))
        if not hasattr(form, "shape") or form.shape or not np.issubdtype(form.dtype, np.number):
            raise _refused(f"one that returns {form!r}")

    def values(self, first: int, count: int) -> np.ndarray:
        """The values of some steps."""
        steps = np.arange(first, first + count)
        if self._program is None:
            return np.array([self._on_host(int(step)) for step in steps])
        found = []
        for block in range(first // BLOCK, -(-(first + count) // BLOCK)):
            if block != self._block:
                self._block, self._known = block, self._compute(block)
            found.append(self._known[steps[steps // BLOCK == block] % BLOCK])
        return np.concatenate(found) if found else np.zeros(0)

    def _compute(self, block: int) -> np.ndarray:
        assert self._program is not None
        start = np.int32(block * BLOCK)
        # Without such a backend, or where arrays that the function holds are on another device, it runs
        # there.
        with contextlib.suppress(RuntimeError, ValueError), _on_the_host():
            return np.asarray(self._program(start), np.float64)
        return np.asarray(self._program(start), np.float64)

    def _first_on_host(self, error: Exception) -> Any:
        """The value of the first step, of a function that a program cannot call."""
        try:
            with np.errstate(all="ignore"):
                value = np.asarray(self._given(np.int32(0)))
        except Exception as other:
            raise _refused(f"one that raises {type(other).__name__}: {other}") from error
        note_once(
            "log={'learning_rate': schedule}: this schedule cannot be called in a compiled program (it "
            "decides by the value of the step, say), so it is called on the host, with a NumPy integer "
            "for each step, which takes longer.",
            key="schedule on the host",
        )
        return value

    def _on_host(self, step: int) -> float:
        try:
            with np.errstate(all="ignore"):
                return float(np.asarray(self._given(np.int32(step))))
        except Exception as error:  # a log must not end the training
            note_once(
                f"log={{'learning_rate': schedule}}: the schedule raised {type(error).__name__} in "
                f"step {step} ({error}). The history has NaN there.",
                key="schedule raised",
            )
            return float("nan")


def _on_the_host() -> contextlib.AbstractContextManager[Any]:
    return jax.default_device(jax.local_devices(backend="cpu")[0])


def _of_block(given: Callable[[Any], Any]) -> Callable[[Any], Any]:
    # Step by step, as in an optimizer: a function may not take arrays of steps.
    return lambda start: jax.lax.map(given, start + jnp.arange(BLOCK, dtype=jnp.int32))


def _refused(what: str) -> OptionError:
    return OptionError(
        f"log={{'learning_rate': schedule}} takes a function of the step that returns one number, as "
        f"optax's schedules do. Received: {what}."
    )
