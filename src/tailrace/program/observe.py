"""`tr.observe`: observe tensors inside any compiled JAX function."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp

from tailrace.base.checks import check_seed
from tailrace.base.trees import Tree
from tailrace.devices.devices import Device
from tailrace.errors import OptionError
from tailrace.jaxprs.array_trees import check_arrays, types_of
from tailrace.jaxprs.internals import value_of
from tailrace.jaxprs.marks import name_values
from tailrace.program.running.device_program import Piece, SegmentProgram
from tailrace.program.running.executable import Executable
from tailrace.program.running.loop_state import LoopState, Numbers
from tailrace.program.running.placement import Placement
from tailrace.program.running.segments import cut
from tailrace.program.tracing.tap_selection import Sight, look
from tailrace.program.tracing.trace import Traced, trace_program
from tailrace.records.records import Records, take_records
from tailrace.taps.catalogue import Catalogue, names_listed_by
from tailrace.taps.naming import Namer
from tailrace.taps.tap import MOST_BYTES, Observe, check_bytes, parse_taps, refuse_guards


def observe(
    function: Callable[..., Any],
    taps: Observe,
    *,
    seed: int = 0,
    observe_bytes: int = MOST_BYTES,
    device: Device = None,
) -> Observed:
    """Wrap a function of arrays so that a call returns `(output, records)`.

    The function is traced and compiled as with `jax.jit`. Its tensors are named `input/...` and
    `output/...` for arguments and results, `activation/<scope>` and `activation/<scope>:<operation>`
    for intermediate values, and `cotangent/<scope>` for the gradient of a scope's output, if the
    function differentiates and the gradient is unambiguous.

    Args:
        function: any JAX function, such as a training step.
        taps: taps (`tr.Tap`), or selections to compute statistics of. A call counts as one step.
        seed: the seed of the keys of `tr.key()`.
        observe_bytes: the most bytes that the records of one call may take (1 GiB if not given); more
            is refused before it runs.
        device: the JAX device to run on; None for the first one.

    Raises:
        OptionError: `function` is not callable, or a tap is a guard of a training.
        SelectionError: no tensor has a selected name; when it is called.

    Example:
        >>> import jax, jax.numpy as jnp, tailrace as tr
        >>> def f(x):
        ...     with jax.named_scope("square"):
        ...         return (x * x).sum()
        >>> output, records = tr.observe(f, [tr.Tap("activation/square:mul", reduce="tensor")])(
        ...     jnp.arange(3.0)
        ... )
        >>> print(output, records["activation/square:mul"].values[0])
        5.0 [0. 1. 4.]
    """
    if not callable(function):
        raise OptionError(f"tr.observe wraps a function of arrays. Received: {function!r}.")
    taps = parse_taps(taps)
    refuse_guards(taps, "a plain function")
    return Observed(function, taps, check_seed(seed), observe_bytes, device)


class Observed:
    """A function that also returns the records of its taps; made by `tr.observe`."""

    def __init__(
        self,
        function: Callable[..., Any],
        taps: list[Any],
        seed: int,
        observe_bytes: int,
        device: Device = None,
    ) -> None:
        self._function, self.taps, self._seed = function, taps, seed
        self._observe_bytes = observe_bytes
        self._placement = Placement(chosen=device)
        self._device = device
        self._versions: dict[Hashable, tuple[Traced, Sight, list[Executable]]] = {}
        self.calls = 0
        # Without its attributes: they would replace ours of the same name.
        functools.update_wrapper(self, function, updated=())

    def __call__(self, *args: Tree) -> tuple[Any, Records]:
        """Run the function; returns its output and the records of this call."""
        on = self._device
        # Around tracing too: constants that the function makes must be on that device.
        with contextlib.nullcontext() if on is None else jax.default_device(on):
            return self._call(args)

    def _call(self, args: tuple[Any, ...]) -> tuple[Any, Records]:
        traced, sight, executables = self._version(args)
        state = LoopState(
            dict(zip(traced.jaxpr.constvars, self._placement.put(traced.consts), strict=True))
        )
        known = state.values
        leaves = self._placement.put(jax.tree.leaves(args))
        known.update(zip(traced.jaxpr.invars, leaves, strict=True))
        records = Records()
        for executable in executables:
            # A call is a step: keys differ from call to call, as from step to step.
            emitted, _ = executable.run(state, Numbers(self._seed, self.calls))
            found = take_records(emitted, sight.chosen, first_step=self.calls, steps=1, replicas=1)
            for record in found:
                records.add(record)
        self.calls += 1
        out = [jnp.asarray(value_of(known, var)) for var in traced.jaxpr.outvars]
        return jax.tree.unflatten(traced.out_structure, out), records

    def tensors(self, *args: Tree) -> Catalogue:
        """The tensors of the function, for arguments like these."""
        traced, entries = self._trace(args)
        return look(traced, (), entries).catalogue

    def _trace(self, args: tuple[Any, ...]) -> tuple[Traced, list[Any]]:
        def named(*args: Tree) -> Tree:
            out = self._function(*name_values("input", args))
            check_arrays("An observed function returns", out)
            return name_values("output", out)

        traced = trace_program(named, args)
        return traced, Namer(enter_custom=True).entries(traced.jaxpr)

    def _version(self, args: tuple[Any, ...]) -> tuple[Traced, Sight, list[Executable]]:
        key = types_of("An observed function takes", args)
        if key not in self._versions:
            traced, entries = self._trace(args)
            with names_listed_by("tensors(*args) of the observed function"):
                sight = look(traced, self.taps, entries)
            if sight.chosen:
                count = max(one.microbatches for one in sight.chosen)
                check_bytes(sight.chosen, 1, count, 1, self._observe_bytes)
            executables = [
                Executable(SegmentProgram(Piece(segment, self._placement, wanted=sight.wanted)))
                # No loop is separate: a call is one dispatch, as with `jax.jit`.
                for segment in cut(traced.jaxpr, ())
            ]
            self._versions[key] = (traced, sight, executables)
        return self._versions[key]
