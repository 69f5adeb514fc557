"""Optional values of a history: `tr.Trainer(..., log=[...])`.

    learning_rate          from the optimizer's state (optax.inject_hyperparams), or a schedule
    grad_norm              the norm of the optimizer's gradient, over all parameters
    examples_per_second    over all replicas
    tokens_per_second      examples times the second dim of the first integer array of a batch
    mfu                    the model's FLOPs as a fraction of the devices' peak

The first two are taps whose records become columns of the history (`schedule` computes a schedule);
the others are derived from time.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np

from tailrace.devices.peaks import PEAKS, peak_of
from tailrace.errors import OptionError
from tailrace.jaxprs.flops import model_flops
from tailrace.jaxprs.marks import path_name
from tailrace.records.history import LOGGED, one_of
from tailrace.records.parts import Part
from tailrace.taps.catalogue import Entry
from tailrace.taps.reductions import norm
from tailrace.taps.tap import Tap
from tailrace.trainer.engine import Engine
from tailrace.trainer.executions import Results
from tailrace.trainer.observation.schedule import Schedule

RATE, NORM, EXAMPLES, TOKENS, MFU = NAMES = LOGGED

IN_STATE = "hyperparams/learning_rate"
"""The end of the path of a rate in the state of `optax.inject_hyperparams`."""

Log = Iterable[str] | Mapping[str, Any]


def is_logged(name: str) -> bool:
    """Whether a column of a history may be one of `log=`, which no step computes."""
    return name in NAMES or name.startswith(f"{RATE}/")


def parse_log(log: object) -> dict[str, Any]:
    """Parse the value of `log=`, by name: True, or the argument of the value."""
    if isinstance(log, str):
        log = [log]
    if log is not None and not isinstance(log, Iterable):
        raise OptionError(
            f"log= is a name among {', '.join(map(repr, NAMES))}, a list of them, or a dict. Received: "
            f"log={log!r}."
        )
    asked: dict[str, Any] = (
        dict(log) if isinstance(log, Mapping) else {str(name): True for name in log or ()}
    )
    for name, given in asked.items():
        if name not in NAMES:
            raise OptionError(
                f"log= has names among {', '.join(map(repr, NAMES))}. Received: {name!r}. Values of "
                f"your own are what the loss function returns as aux."
            )
        fitting = {RATE: callable(given), MFU: isinstance(given, int | float) and given > 0}
        if given is not True and not fitting.get(name, False):
            raise OptionError(
                f"log= gives a schedule for 'learning_rate', a peak in FLOP/s for 'mfu', and True for "
                f"the others. Received: {name!r}: {given!r}."
            )
    return asked


def taps_of(asked: Mapping[str, Any]) -> list[Tap]:
    """The taps whose records become columns."""
    taps = []
    if NORM in asked:
        taps.append(Tap("reduced/*", reduce=_kept_as(NORM, norm)))
    if asked.get(RATE) is True:
        taps.append(Tap(_is_rate, reduce=_kept_as(RATE, lambda value: value)))
    return taps


def _is_rate(entry: Entry) -> bool:
    # Of a step of the user's own the state as it leaves: with the rates that the step has used.
    return entry.kind in ("optimizer", "updated") and entry.name.endswith(IN_STATE)


def _kept_as(name: str, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A reduction with a distinct kind, so that it differs from the user's taps."""

    def reduce(value: object) -> Any:
        return function(value)

    # A record's kind is the name of its reduction.
    reduce.__name__ = f"log:{name}"
    return reduce


class LoggedValues:
    """The requested values, computed per execution.

    Args:
        asked: the result of `parse_log`.
        engine: the engine.
    """

    def __init__(self, asked: Mapping[str, Any], engine: Engine) -> None:
        self._asked, self._engine = asked, engine
        self._last, self._compiled = 0.0, 0.0
        given: Any = asked.get(RATE)
        self._schedule = Schedule(given) if callable(given) else None
        if asked.get(RATE) is True and not _has_rate(engine):
            raise OptionError(
                "log='learning_rate' reads the rate from the optimizer's state, and this has none "
                "there. Make it with optax.inject_hyperparams(optax.adam)(learning_rate=...), or "
                "give the schedule: log={'learning_rate': schedule}."
            )
        # Asked now for its error: after hours of training it would come too late.
        if MFU in asked:
            self._peak()

    def restart(self) -> None:
        """Restart the clock."""
        self._last, self._compiled = time.perf_counter(), self._compile_s()

    def complete(self, results: Results) -> Results:
        """The results of an execution that has just ended, with these values as scalars."""
        if not self._asked:
            return results
        now, compiled = time.perf_counter(), self._compile_s()
        # Compiling is not training: a rate that contains it would say nothing of the next hour.
        seconds = max(now - self._last - (compiled - self._compiled), 1e-9)
        self._last, self._compiled = now, compiled
        # Taken out of the records: users asked for a column of the history, not for a tap.
        own = {part.kind for part in results.parts if part.kind.startswith("log:")}
        values = self._of_taps([part for part in results.parts if part.kind in own])
        shape = one_of(results.scalars).shape
        if self._schedule is not None:
            values[RATE] = self._schedule.values(results.first_step, shape[0])
        rates = self._rates(results.steps / seconds)
        values.update({name: np.full(shape[0], rate) for name, rate in rates.items()})
        columns = {
            name: np.broadcast_to(value[: shape[0], None, None], shape).astype(np.float32)
            for name, value in values.items()
        }
        return dataclasses.replace(
            results,
            parts=[part for part in results.parts if part.kind not in own],
            scalars={**results.scalars, **columns},
        )

    def _of_taps(self, parts: list[Part]) -> dict[str, np.ndarray]:
        squares, rates = [], {}
        for part in parts:
            values = np.asarray(part.record().values, np.float64)
            # The norm of all gradients, from the norms of each: tensors themselves never leave the
            # device.
            if part.kind == f"log:{NORM}":
                squares.append(values**2)
            else:
                rates[part.name] = values
        found = {NORM: np.sqrt(sum(squares))} if squares else {}
        if len(rates) == 1:
            found[RATE] = next(iter(rates.values()))
        else:  # an optimizer of several parts has a rate for each
            found.update(
                {
                    f"{RATE}/{part}": rates[name]
                    for name, part in _distinct_parts(list(rates)).items()
                }
            )
        return found

    def _rates(self, steps_per_second: float) -> dict[str, float]:
        engine, found = self._engine, {}
        count = engine.accumulation.microbatches * engine.placement.replicas
        leaves = engine.runner.infeeds[0].spec().leaves
        sizes = [leaf.shape[0] for leaf in leaves if leaf.shape]
        examples = (min(sizes) if sizes else 1) * count * steps_per_second
        if EXAMPLES in self._asked:
            found[EXAMPLES] = examples
        if TOKENS in self._asked:
            found[TOKENS] = examples * _tokens(leaves)
        if MFU in self._asked:
            # Those of the model as written: recomputed activations use the device, but are not
            # progress.
            flops = model_flops(engine.runner.traced.jaxpr.eqns) * engine.placement.replicas
            devices = len(engine.placement.device_ids)
            found[MFU] = flops * steps_per_second / (self._peak() * devices)
        return found

    def _peak(self) -> float:
        given, kind = self._asked[MFU], self._engine.placement.device.device_kind
        peak = float(given) if given is not True else peak_of(kind)
        if peak is None:
            raise OptionError(
                f"log='mfu' needs the peak of the device, which is known of {', '.join(PEAKS)}. "
                f"Received: {kind}. Give it in floating-point operations a second: log={{'mfu': 1e12}}."
            )
        return peak

    def _compile_s(self) -> float:
        return self._engine.runner.compile_s


def _tokens(leaves: Iterable[Any]) -> int:
    """The tokens per example: the second dim of the first integer array of a batch."""
    for leaf in leaves:
        if np.issubdtype(leaf.dtype, np.integer) and len(leaf.shape) > 1:
            return int(leaf.shape[1])
    raise OptionError(
        "log='tokens_per_second' counts the entries of an integer array [examples, tokens] in a batch. "
        "Received: a batch without one. Log 'examples_per_second'."
    )


def _has_rate(engine: Engine) -> bool:
    form = engine.form
    held = form.optimizer_state if jax.tree.leaves(form.params) else form
    paths = jax.tree_util.tree_flatten_with_path(held)[0]
    return any(path_name(path).endswith(IN_STATE) for path, _ in paths)


def _distinct_parts(names: list[str]) -> dict[str, str]:
    """The parts of paths by which they differ: those that all paths share say nothing.

    >>> _distinct_parts(["opt_state/0/learning_rate", "opt_state/1/learning_rate"])
    {'opt_state/0/learning_rate': '0', 'opt_state/1/learning_rate': '1'}
    """
    if not names:
        return {}
    paths = {name: name.split("/") for name in names}
    first = next(iter(paths.values()))
    start, end = 0, 0
    while all(len(path) > start and path[start] == first[start] for path in paths.values()):
        start += 1
    shortest = min(map(len, paths.values()))
    while end < shortest - start - 1 and len({path[-1 - end] for path in paths.values()}) == 1:
        end += 1
    return {name: "/".join(path[start : len(path) - end]) for name, path in paths.items()}
