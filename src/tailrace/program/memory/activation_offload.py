"""Activations offloaded to host memory: the forward pass in parts, one on the device at a time.

    forward    part 0 ──▶ part 1 ──▶ ... ──▶ part n      values that cross a cut are sent to the host
    backward   part 0 ◀── part 1 ◀── ... ◀── part n      and come back for the part that needs them

Everything else is recomputed, part by part, from those values: on today's devices that takes a fraction
of the time of a transfer. A loop over layers (`lax.scan`) has parts already: its carry is sent, and
each iteration is recomputed (`layer_loops.py`).

XLA schedules copies freely, and tends to copy late: a value would stay on the device until the backward
pass needs it, and no memory would be saved. A branch enforces an order, because its operands must be
ready before it runs. After each part there is one that waits until the values of the previous cut have
been sent; values come back inside one that waits for all gradients of the part after it. The other side
of each branch is never taken, but XLA does not know that.
"""

# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tailrace.base.messages import logger, note_once
from tailrace.base.trees import Tree
from tailrace.devices.devices import Device
from tailrace.jaxprs import internals
from tailrace.jaxprs.internals import ClosedJaxpr, JaxprEqn, Var, nbytes
from tailrace.jaxprs.marks import ambient
from tailrace.jaxprs.stretches import Stretch, opened, results_of, run
from tailrace.jaxprs.walk import acts_on_host
from tailrace.program.memory import host_memory, layer_loops
from tailrace.program.memory.host_memory import PARTS, Moves
from tailrace.program.memory.offload_segments import Segments, segments

LEAST_BYTES = 1 << 20
"""Smaller values stay on the device: a separate copy costs more than the memory is worth."""


class HeldActivations:
    """`jax.value_and_grad` of a forward pass whose activations are offloaded to host memory.

    Args:
        moves: transfers values between the memories.
        parts: the largest number of parts of a forward pass.
        least: values with fewer bytes stay on the device.
        check: called with the bytes per microbatch that the host will hold; may refuse them.

    Attributes:
        said: messages about the latest forward pass.
    """

    def __init__(
        self,
        moves: Moves,
        parts: int,
        least: int,
        check: Callable[[int], None] = lambda needed: None,
    ) -> None:
        self.moves, self.parts, self.least, self.check = moves, parts, least, check
        self.said: tuple[str, ...] = ()

    def value_and_grad(self, forward: Callable[[Any], tuple[Any, Any]]) -> Callable[[Any], Any]:
        """Like `jax.value_and_grad(forward, has_aux=True)`."""

        def call(params: Tree) -> Any:
            leaves, structure = jax.tree.flatten(params)
            form: list[Any] = []

            def flat(*leaves: jax.Array) -> list[Any]:
                out, out_form = jax.tree.flatten(forward(jax.tree.unflatten(structure, leaves)))
                form[:] = [out_form]
                return out

            # Inlined: a cut may be inside a `jit`, which most layers of libraries are.
            closed = opened(jax.make_jaxpr(flat)(*leaves), leaves)
            once = acts_on_host(closed.jaxpr.eqns)
            cut = segments(closed.jaxpr, 1 if once else self.parts)
            passes = _Passes(self, cut, closed)
            if not any(passes.crossing):  # nothing to send, so nothing to recompute
                cut = segments(closed.jaxpr, 1)
                passes = _Passes(self, cut, closed)
            self._say(cut, passes, once)
            outputs, grads = passes.run(leaves)
            return jax.tree.unflatten(form[0], outputs), jax.tree.unflatten(structure, grads)

        return call

    def _say(self, cut: Segments, passes: _Passes, once: bool) -> None:
        sent = sum(nbytes(var.aval) for each in passes.crossing for var in each)
        loops = sum(
            layer_loops.carried_bytes(eqn, self.least)
            for part in cut.parts
            for eqn in part.equations
        )
        # Before anything runs: the shapes are known, and a host without memory gives no message.
        self.check(sent + loops)
        if once and not sent + loops:
            message = (
                "Activations stay on the device: the forward pass has effects on the host "
                "(jax.debug.print, a callback), and would have to run again. Leave them out, or use "
                "tr.print_tensor."
            )
            note_once(message)
        elif not sent + loops:
            message = (
                "Activations stay on the device: there is no place to cut the forward pass where "
                "less crosses the cut than it would save."
            )
            note_once(message)
        else:
            what = [f"what crosses the cuts into {len(cut.parts)} parts"] if sent else []
            what += ["what loops carry"] if loops else []
            message = (
                f"Activations: of a microbatch {(sent + loops) / 1e6:,.1f} MB are kept in host "
                f"memory ({' and '.join(what)}); the rest is computed again."
            )
            logger.info(message)
        self.said = (message,)


def activations_on_host(
    device: Device, pipelined: bool = False, replicas: int = 1
) -> tuple[HeldActivations | None, tuple[str, ...]]:
    """The object that offloads the activations, if that is possible, and a message about it.

    A pipeline offloads its stash instead, and does not cut its forward passes further. Without a
    pipeline, the message is known once the forward pass is traced. `replicas` share the host's memory.
    """
    why_not = host_memory.obstacle(device, guarded=False)
    if why_not is not None:
        message = f"Activations stay on the device: {why_not}."
        note_once(message)
        return None, (message,)
    message = "Activations: what forwards keep for backwards is in the host's memory."

    def check(needed: int) -> None:
        check_fits(needed * replicas, device.platform)

    held = HeldActivations(host_memory.memory_moves(), PARTS, LEAST_BYTES, check)
    return held, (message,) if pipelined else ()


def check_fits(needed: int, platform: str) -> None:
    """Refuse to offload more than the host has memory for."""
    host_memory.check_fits(
        needed,
        host_memory.free_host_memory(),
        platform,
        "offload_activations",
        "Leave it out, or give each step more and smaller microbatches.",
    )


class _Passes:
    """The forward and the backward pass of one microbatch, while they are traced."""

    def __init__(self, held: HeldActivations, cut: Segments, closed: ClosedJaxpr) -> None:
        self.held, self.moves, self.cut, self.closed = held, held.moves, cut, closed
        # A part with such a loop has parts already, and is not recomputed as a whole.
        self.whole = [
            number == len(cut.parts) - 1
            or any(layer_loops.carried(eqn, held.least) for eqn in part.equations)
            for number, part in enumerate(cut.parts)
        ]
        # Only parts that are recomputed read their inputs again; other values need not be sent.
        again = {
            var
            for part, whole in zip(cut.parts, self.whole, strict=True)
            if not whole
            for var in part.reads
        }
        self.crossing = [[var for var in each if var in again] for each in cut.crossing(held.least)]
        self.known: dict[Any, Any] = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        self.hosts: dict[Any, Any] = {}
        self.gradients: dict[Any, Any] = {}
        self.latest: list[Any] = []
        # Always false, since a step's index is never negative; but XLA does not know that.
        self.never = ambient("step", -1, 1) < 0

    def run(self, leaves: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """The program's results, and the gradient of the first with respect to each input."""
        jaxpr = self.closed.jaxpr
        self.known.update(zip(jaxpr.invars, leaves, strict=True))
        backwards = [self._forward(self.cut.before)]
        for number, part in enumerate(self.cut.parts):
            if self.whole[number]:
                backwards.append(self._forward(part))
            else:
                run(part.equations, self.known)
                backwards.append(lambda part=part: self._again(part))
            self._send(number)
        outputs = results_of(self.known, jaxpr.outvars)
        loss = jaxpr.outvars[0]
        if isinstance(loss, Var) and loss in self.cut.active:
            self.gradients[loss] = jnp.ones_like(self.known[loss])
        # All forwards have been emitted by now; in this order each part's activations die before
        # those of the part before it are made.
        for backward in reversed(backwards):
            backward()
        grads = [
            self.gradients[var] if var in self.gradients else jnp.zeros_like(leaf)
            for var, leaf in zip(jaxpr.invars, leaves, strict=True)
        ]
        return outputs, grads

    def _send(self, number: int) -> None:
        """Offload the values that cross the cut after a part; wait for those of the previous cut."""
        for var in self.crossing[number]:
            self.hosts[var] = self.moves.send_back(self.known[var])
        made = self.cut.parts[number].makes
        if number and self.crossing[number - 1] and made and not self.whole[number]:
            # The largest result: XLA must finish the sends before any part that uses it can start.
            gate = max(made, key=lambda var: nbytes(var.aval))
            sent = [self.hosts[var] for var in self.crossing[number - 1]]
            (self.known[gate],) = self._after([self.known[gate]], sent, self.moves.bring_in)

    def _after(
        self,
        values: Sequence[Any],
        awaited: Sequence[Any],
        read: Callable[[Any], Any] = lambda value: value,
        move: Callable[[Any], Any] = lambda value: value,
    ) -> list[Any]:
        """`values`, transferred, but not before everything in `awaited` is ready."""
        if not awaited:
            return [move(value) for value in values]

        # It must really use what is awaited, or XLA would drop those operands of the branch.
        def instead(values: Sequence[Any], awaited: Sequence[Any]) -> list[Any]:
            some = [read(one).reshape(-1)[0].astype(jnp.float32) for one in awaited]
            total = jnp.stack(some).sum()
            return [jnp.broadcast_to(total.astype(value.dtype), value.shape) for value in values]

        def moved(values: Sequence[Any], _: object) -> list[Any]:
            return [move(value) for value in values]

        return lax.cond(self.never, instead, moved, list(values), list(awaited))

    def _again(self, part: Stretch) -> None:
        """Recompute a part, and its gradients, once those of the part after it are ready."""
        made = [var for var in part.makes if var in self.gradients]
        if not made:
            return
        given = {var: self.known[var] for var in part.reads}
        away = [var for var in part.reads if var in self.hosts]
        if away:
            hosts = [self.hosts[var] for var in away]
            come = self._after(hosts, self.latest, move=self.moves.bring_in)
            given.update(zip(away, come, strict=True))
        # Nothing was sent for this part: hold back its batch instead, so that it does not run early.
        elif of_elements := [v for v in self.closed.jaxpr.constvars if v in given]:
            gate = max(of_elements, key=lambda var: nbytes(var.aval))
            (given[gate],) = self._after([given[gate]], self.latest)
        wanted = [var for var in part.reads if var in self.cut.active]

        def again(given: Sequence[Any], gradients: Sequence[Any]) -> Any:
            known = dict(zip(part.reads, given, strict=True))
            return self._pullback(part, made, known, wanted)[1](list(gradients))

        # `replayed` tells taps and prints that this is a repetition.
        gradients = [self.gradients[var] for var in made]
        self._add(wanted, internals.replayed(again, list(given.values()), gradients))

    def _forward(self, part: Stretch) -> Callable[[], None]:
        """Run a part with its residuals kept on the device; returns its backward pass."""
        made = [var for var in part.makes if var in self.cut.active]
        wanted = [var for var in part.reads if var in self.cut.active]
        if not made:
            run(part.equations, self.known)
            return lambda: None
        values, pull = self._pullback(part, made, self.known, wanted)
        self.known.update(zip(part.makes, values, strict=True))

        def backward() -> None:
            if any(var in self.gradients for var in made):
                given = [
                    self.gradients[var]
                    if var in self.gradients
                    else jnp.zeros_like(self.known[var])
                    for var in made
                ]
                self._add(wanted, pull(given))

        return backward

    def _pullback(
        self, part: Stretch, made: Sequence[Any], known: dict[Any, Any], wanted: Sequence[Any]
    ) -> tuple[list[Any], Callable[[list[Any]], Any]]:
        """A part's results, and a function from gradients of `made` to gradients of `wanted`."""

        def compute(*values: jax.Array) -> Any:
            inside = {**known, **dict(zip(wanted, values, strict=True))}
            run(part.equations, inside, self._emit)
            return [inside[var] for var in made], [inside[var] for var in part.makes]

        _, pull, values = jax.vjp(compute, *(known[var] for var in wanted), has_aux=True)
        return values, pull

    def _emit(self, eqn: JaxprEqn, inputs: list[Any]) -> list[Any]:
        return layer_loops.emit(eqn, inputs, self.held.least, self.moves)

    def _add(self, variables: Sequence[Any], gradients: Sequence[Any]) -> None:
        for var, gradient in zip(variables, gradients, strict=True):
            before = self.gradients.get(var)
            # A value that several parts use has a gradient from each; the later part comes first.
            self.gradients[var] = gradient if before is None else before + gradient
        # A barrier over all of them: XLA would postpone those of parameters and keep their operands.
        self.latest = [self.gradients[var] for var in variables]
