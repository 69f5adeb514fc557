"""The program of an inference model: one forward pass per batch of a call."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tailrace.base.trees import Tree
from tailrace.feeds.feed import HandedFeed
from tailrace.jaxprs.marks import name_values
from tailrace.program.loops import repeat_with, whole
from tailrace.program.running.loop_runner import LoopRunner
from tailrace.program.running.loop_state import LoopState, Numbers
from tailrace.program.running.placement import Placement
from tailrace.program.tracing.tap_selection import Sight, look
from tailrace.records.records import Part, Records, take_records
from tailrace.taps.catalogue import Catalogue, Entry, matches
from tailrace.taps.frame import Emission
from tailrace.taps.probe import probed
from tailrace.taps.tap import Chosen, check_bytes, parse_taps
from tailrace.torch.calls.options import ModelOptions
from tailrace.torch.programs.portions import Portions, Sent
from tailrace.torch.tracing.forward import Forward


class InferenceProgram:
    """A loop of forward passes, fed by calls."""

    def __init__(
        self,
        forward: Forward,
        options: ModelOptions,
        params: Mapping[str, Any],
        buffers: Mapping[str, Any],
        own_taps: Sequence[Any],
        seed: int,
    ) -> None:
        self.forward, self.options, self.seed, self.calls = forward, options, seed, 0
        self.feed = HandedFeed(forward.form.spec())
        self.feed.bind_replicas(options.replicas)
        self.taps = [*own_taps, *parse_taps(options.observe)]
        self.records = Records()
        self.found: list[Entry] = []
        self.runner = self._make_runner(dict(params), dict(buffers))
        self.runner.build = self.options.build
        # Nothing is differentiated here.
        named = [e for e in self.found if e.kind != "cotangent"]
        self.sight: Sight = look(self.runner.traced, self._looking(), named, self.runner.stage_of)
        self.runner.wanted = self.sight.wanted
        steps, replicas = options.device_iterations, options.replicas
        check_bytes(self._chosen(), steps, 1, replicas, options.observe_bytes)
        self.put(params, buffers)
        self.portions = Portions(self.runner, self.sight, self.passes, forward.form.resident)

    @property
    def catalogue(self) -> Catalogue:
        """Every tensor of the forward pass."""
        return self.sight.catalogue

    @property
    def buffers(self) -> Any:
        """The buffers on the device."""
        return self.runner.carried(self.loop_state)

    def put(self, params: Mapping[str, Any], buffers: Mapping[str, Any]) -> None:
        """Replace the weights; they are copied."""
        # Copies: the host's arrays may share memory with tensors that are trained on.
        self.params = {name: jnp.array(value) for name, value in params.items()}
        self.loop_state = self._begin(self.params, dict(buffers))

    def compile(self) -> None:
        """Compile without running anything."""
        self.portions.compile(self.loop_state)

    def run(self, blocks: list[Any]) -> dict[tuple[str, str], Part]:
        """Run one execution; returns the emissions of its taps."""
        numbers = Numbers(self.seed, self.calls)
        sent = Sent()
        self.portions.dispatch(self.loop_state, numbers, blocks, sent)
        emitted = self.portions.results(sent)
        # Without emissions nothing else waits, and the caller's memory is in use until the end.
        jax.block_until_ready(sent.ready)
        parts = take_records(
            self._by_batch(emitted),
            self._chosen(),
            first_step=self.calls,
            steps=self.options.device_iterations,
            replicas=self.options.replicas,
            period=self.sight.period,
        )
        self.calls += self.options.device_iterations
        # Records are those of the latest call, as for training.
        self.records.clear()
        for part in parts:
            self.records.add(part)
        return {(part.name, part.kind): part for part in parts}

    def close(self) -> None:
        """Do nothing: nothing is open."""

    # -- overridden for pipelines ---------------------------------------------------------------

    def _make_runner(self, params: Tree, buffers: Tree) -> LoopRunner:
        def one(state: Tree, element: Tree, read: Tree) -> Any:
            # The body of a loop may be traced more than once.
            self.found.clear()
            named = (name_values("param", read), name_values("buffer", state))
            return self._forward_pass(*named, name_values("input", element))

        def program(state: Tree, read: Tree) -> Any:
            return repeat_with(whole, 1, lambda s, e: one(s, e, read), state, self.feed)

        return LoopRunner(program, buffers, params, Placement(self.options.replicas))

    def _begin(self, params: Tree, buffers: Tree) -> LoopState:
        return self.runner.begin(buffers, params)

    @property
    def passes(self) -> int:
        """How many passes of the loop a call makes."""
        return self.options.device_iterations

    def _looking(self) -> list[Any]:
        """The taps for the program."""
        return self.taps

    def _chosen(self) -> list[Chosen]:
        """The selected tensors, as if each batch were one iteration."""
        return self.sight.chosen

    def _by_batch(self, emitted: dict[Hashable, Emission]) -> dict[Hashable, Emission]:
        """The emissions, as if each batch were one iteration."""
        return emitted

    def _forward_pass(self, params: Tree, state: Tree, element: Tree) -> Any:
        """The next buffers; observed values are marked, and all activations listed."""
        run = probed(lambda p, s, e: self.forward(p, s, e)[1], self._is_wanted, self.found)
        return run(params, state, element)

    def _is_wanted(self, entry: Entry) -> bool:
        return any(matches(tap.select, entry) for tap in self.taps)
