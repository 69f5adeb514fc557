"""Answers to the page's requests, ready for JSON, with no more points than it can show."""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from tailrace.base.messages import shown
from tailrace.errors import OptionError, RunError, TailraceError
from tailrace.page.cells import cell_records, grid
from tailrace.page.colours import NONFINITE, SCALE
from tailrace.page.curves import Curve, history_curves
from tailrace.page.findings.findings import findings
from tailrace.page.followed import FollowedRun
from tailrace.page.layers import layer_map, without_gaps
from tailrace.page.measures import SOURCES, TITLES
from tailrace.page.server.shown_runs import ShownRuns
from tailrace.page.summary import TIME, numbers, state, time_rows, what_ran
from tailrace.page.tensors import exponents, format_limits, places, statistics
from tailrace.records.exponents import BIAS, format_sentences
from tailrace.taps.reductions import INF_BIN, NAN_BIN, ZERO_BIN

MOST_MATCHES, MOST_ROWS = 300, 1000
"""The most tensors of a catalogue, and rows of a heat map, per answer."""

MOST_RUNS = 32
"""The most runs per answer: more curves than that look alike."""

MOST_NUMBER = 10**15
"""The largest step, stage or microbatch to ask for."""


class Answers:
    """Answers about some runs. Each takes the query of a request: its runs are `runs=0,2`."""

    def __init__(self, runs: Sequence[FollowedRun]) -> None:
        self.runs = runs

    def overview(self, query: dict[str, str]) -> Any:
        """The runs, and constants for the page."""
        if isinstance(self.runs, ShownRuns):
            self.runs.find()
        return {
            "runs": [self._about(number) for number in range(len(self.runs))],
            "scale": SCALE,
            "nonfinite": NONFINITE,
            "formats": format_limits(),
            "measures": TITLES,
        }

    def _about(self, number: int) -> Any:
        followed = self.runs[number]
        about: dict[str, Any] = {
            "number": number,
            "name": shown(followed.name),
            "directory": str(followed.directory),
            "problem": followed.problem,
            "version": followed.version,
            "state": state(followed),
            "steps": 0,
            "numbers": [],
        }
        if (run := followed.run) is not None:
            # A damaged run must not take the others from the page.
            try:
                with followed.reading():
                    about["steps"] = len(run.history)
                    key = ("numbers", followed.version)
                    about["numbers"] = followed.kept(key, lambda: numbers(followed))
            except TailraceError as error:
                about["problem"] = str(error)
        return about

    def curves(self, query: dict[str, str]) -> Any:
        """Loss, metrics and speed of the chosen runs."""
        first, last = _range(query)
        return self._each(
            query,
            lambda followed: {
                "curves": {
                    name: _curve(curve)
                    for name, curve in history_curves(followed, first, last).items()
                }
            },
        )

    def findings(self, query: dict[str, str]) -> Any:
        """Findings about the chosen runs."""
        return self._each(
            query, lambda followed: {"findings": [asdict(one) for one in findings(followed)]}
        )

    def about(self, query: dict[str, str]) -> Any:
        """The descriptions of the selected runs."""

        def of(followed: FollowedRun) -> Any:
            times = time_rows(followed)
            return {"sections": ({TIME: times} if times else {}) | what_ran(followed)}

        return self._each(query, of)

    def catalogue(self, query: dict[str, str]) -> Any:
        """The tensors of one run whose names contain all words of a search."""
        followed = self._one(query)
        with followed.reading():
            return self._matches(followed, query)

    @staticmethod
    def _matches(followed: FollowedRun, query: dict[str, str]) -> Any:
        kinds: dict[str, list[str]] = {}
        for table in followed.readable().tables:
            for name in table.names:
                kinds.setdefault(name, []).append(table.kind)
        words = query.get("search", "").lower().split()
        only = query.get("recorded") == "1"
        found = [
            entry
            for entry in followed.catalogue
            if all(word in entry.name.lower() for word in words)
            and (not only or entry.name in kinds)
        ]
        rows = [
            {
                "name": entry.name,
                "shape": list(entry.shape),
                "dtype": str(entry.dtype),
                "stage": entry.stage,
                "source": entry.source,
                "recorded": kinds.get(entry.name, []),
            }
            for entry in found[:MOST_MATCHES]
        ]
        return {"total": len(found), "tensors": rows}

    def tensor(self, query: dict[str, str]) -> Any:
        """Statistics and exponents of one tensor in the chosen runs."""
        name, (first, last) = query.get("name", ""), _range(query)

        def of(followed: FollowedRun) -> Any:
            curves = statistics(followed, name, first, last)
            return {
                "kinds": [table.kind for table, _ in places(followed, name)],
                "curves": {title: _curve(curve) for title, curve in curves.items()},
                "exponents": _exponents(followed, name),
            }

        return self._each(query, of)

    def layers(self, query: dict[str, str]) -> Any:
        """A measure of many tensors over the steps of the chosen runs."""
        measure = query.get("measure", "rms")
        if measure not in SOURCES:
            raise OptionError(
                f"A measure is one of {', '.join(SOURCES)}. Received: {measure!r:.80}."
            )

        def of(followed: FollowedRun) -> Any:
            found = layer_map(followed, measure, query.get("select") or "*")
            values = found.values[:MOST_ROWS]
            return {
                "names": found.names[:MOST_ROWS],
                "total": len(found.names),
                "first": int(found.steps[0]) if len(found.steps) else 0,
                "width": found.width,
                "columns": len(found.steps),
                "values": _packed(values if measure == "nonfinite" else without_gaps(values)),
                "problems": found.problems,
            }

        return self._each(query, of)

    def plan(self, query: dict[str, str]) -> Any:
        """The grids of the chosen runs."""
        return self._each(query, lambda followed: {"grid": grid(followed)})

    def cell(self, query: dict[str, str]) -> Any:
        """The records of one cell of a grid."""
        followed = self._one(query)
        kind = "B" if query.get("kind") == "B" else "F"
        stage, microbatch = _whole(query, "stage"), _whole(query, "microbatch")
        with followed.reading():
            rows = cell_records(followed, kind, stage, microbatch)
        return {"records": [{k: _number(v) for k, v in row.items()} for row in rows]}

    # -- shared by the answers --------------------------------------------------------------------

    def _each(self, query: dict[str, str], make: Callable[[FollowedRun], dict[str, Any]]) -> Any:
        """An answer for each selected run; for an unreadable run, its problem."""
        found = []
        for number in self._chosen(query):
            followed = self.runs[number]
            answer: dict[str, Any] = {"run": number, "problem": followed.problem}
            try:
                followed.readable()
                with followed.reading():
                    answer |= make(followed)
            except TailraceError as error:
                answer["problem"] = str(error)
            found.append(answer)
        return found

    def _chosen(self, query: dict[str, str]) -> list[int]:
        text, count = query.get("runs", ""), len(self.runs)
        parts = text.split(",") if text else map(str, range(count))
        # An old page may ask for runs that this server does not have. Each is answered for once.
        numbers = dict.fromkeys(_number_in(part, count) for part in parts)
        chosen = [number for number in numbers if number is not None and number < count]
        if len(chosen) > MOST_RUNS:
            raise OptionError(
                f"A chart shows at most {MOST_RUNS} runs, and {len(chosen)} are chosen. Choose fewer."
            )
        return chosen

    def _one(self, query: dict[str, str]) -> FollowedRun:
        chosen = self._chosen(query)
        if not chosen:
            raise RunError(f"There is no run with the number {query.get('runs')!r:.80}.")
        return self.runs[chosen[0]]


def _range(query: dict[str, str]) -> tuple[int | None, int | None]:
    first, last = (
        _whole(query, name) if query.get(name, "") else None for name in ("first", "last")
    )
    return first, last


def _whole(query: dict[str, str], name: str) -> int:
    text = query.get(name, "")
    if not (text.isascii() and text.isdigit()):
        raise OptionError(f"{name} is a whole number. Received: {text!r:.80}.")
    number = _number_in(text, MOST_NUMBER)
    if number is None or number > MOST_NUMBER:
        raise OptionError(f"{name} is at most {MOST_NUMBER}. Received: {len(text)} digits.")
    return number


def _number_in(text: str, most: int) -> int | None:
    """The number that digits make; None for other text, and for more digits than `most` has."""
    # Not isdigit alone: "²" is a digit, and int() refuses it, as it does 5,000 digits.
    plain = text.isascii() and text.isdigit() and len(text) <= len(str(most))
    return int(text) if plain else None


def _curve(curve: Curve) -> Any:
    made: dict[str, Any] = {
        "steps": curve.steps.tolist(),
        "mean": _numbers(curve.mean),
        "nonfinite": curve.nonfinite,
        "first_nonfinite": curve.first_nonfinite,
        "last": _number(curve.last),
    }
    if not curve.is_exact:
        made |= {"low": _numbers(curve.low), "high": _numbers(curve.high)}
    return made


def _exponents(followed: FollowedRun, name: str) -> Any:
    """Counts by exponent and step, for the exponents that occur; None without such records."""
    found = exponents(followed, name)
    if found is None or not len(found.steps):
        return None
    counts = found.counts
    there = np.flatnonzero(counts[:, :INF_BIN].sum(axis=0))
    low, high = (int(there[0]), int(there[-1]) + 1) if len(there) else (BIAS, BIAS + 1)
    total = np.maximum(counts.sum(axis=1), 1)
    # Which formats fit is judged by the last quarter: early steps often have other ranges.
    late = counts[-max(1, len(counts) // 4) :].sum(axis=0)
    return {
        "first": int(found.steps[0]),
        "width": found.width,
        "columns": len(found.steps),
        "least": low - BIAS,
        "rows": high - low,
        "counts": _packed((counts[:, low:high] / total[:, None]).T),
        "zero": _numbers(counts[:, ZERO_BIN] / total),
        "nonfinite": _numbers(counts[:, INF_BIN] + counts[:, NAN_BIN]),
        "sentences": format_sentences(late),
    }


def _packed(values: np.ndarray) -> str:
    """Numbers as text for a typed array of the browser: JSON has no NaN and takes longer to parse."""
    return base64.b64encode(np.ascontiguousarray(values, "<f4").tobytes()).decode()


def _numbers(values: np.ndarray) -> list[float | None]:
    """Numbers with six digits; None for those that JSON cannot represent."""
    return [float(f"{v:.6g}") if math.isfinite(v) else None for v in values.tolist()]


def _number(value: object) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value
