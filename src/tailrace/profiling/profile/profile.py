"""A profile: the cost of each scope and phase of a step, as plain data."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tailrace.base.files import parse_json, read_bytes
from tailrace.base.paths import in_words
from tailrace.errors import RunError
from tailrace.profiling.profile.measurement import Measurement, Row
from tailrace.profiling.profile.pipeline_times import PipelineTimes
from tailrace.profiling.profile.texts import as_html, as_text, as_tree
from tailrace.profiling.profile.treemap import treemap_svg

FORMAT = 1
"""The version of the JSON file; files of another version are refused."""


@dataclasses.dataclass(frozen=True)
class Profile(Measurement):
    """A training step by scope. Prints as a table, most expensive first.

    Attributes:
        rows: each scope in each phase, most expensive first.
        steps: the number of profiled steps.
        executions: the number of executions.
        wall_s: their duration.
        named: the fraction of the operations' self time that has a scope or phase.
        device: the kind of device.
        peak_flops: FLOPs per second that the device reaches.
        peak_bytes: bytes per second that it reads and writes.
        memory: bytes at peak memory use, by owner, largest first.
        pipeline: the times of a pipeline's cells; None without one, or if they were not measured.
    """

    def __str__(self) -> str:
        return as_text(self)

    def _repr_html_(self) -> str:
        return as_html(self)

    def tree(self) -> str:
        """The scopes as a tree, with the time of everything in them."""
        return as_tree(self)

    def treemap(self) -> Treemap:
        """A picture: nested phases and scopes, with areas proportional to time."""
        return Treemap(treemap_svg(self))

    # -- on disk --------------------------------------------------------------------------------

    def to_json(self) -> str:
        """The profile as JSON, for `Profile.from_json`."""
        return json.dumps({"format": FORMAT, **dataclasses.asdict(self)}, indent=1)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the profile as JSON; raises a RunError if the file cannot be written."""
        _write(path, self.to_json())

    @staticmethod
    def from_json(text: str) -> Profile:
        """A profile from JSON; raises a RunError for anything else."""
        try:
            found: dict[str, Any] = parse_json(text)
            if found.pop("format") != FORMAT:
                raise KeyError("format")
            rows = tuple(Row(**row) for row in found.pop("rows"))
            pipeline = found.pop("pipeline")
            times = PipelineTimes.from_dict(pipeline) if pipeline is not None else None
            return Profile(rows=rows, pipeline=times, **found)
        # The file may be any JSON: each of these errors means that it does not describe a profile.
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise RunError(
                f"A profile is what trainer.profile(...).save(file) writes. Received something "
                f"else ({type(error).__name__}: {error})."
            ) from error

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Profile:
        """Read a profile that `save` wrote."""
        try:
            # A file of a run is untrusted: it may be a pipe, or without end.
            text = read_bytes(path, RunError, description=True).decode()
        except UnicodeDecodeError as error:
            raise RunError(
                f"A profile is what trainer.profile(...).save(file) writes. Received: {str(path)!r}, "
                f"which is no text."
            ) from error
        except OSError as error:
            raise RunError(
                f"The profile {str(path)!r} cannot be read: {in_words(error, reading=True)}"
            ) from error
        return Profile.from_json(text)


class Treemap(str):
    """An SVG picture that shows itself in a notebook."""

    def _repr_svg_(self) -> str:
        return str(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the picture as a file; raises a RunError if it cannot be written."""
        _write(path, self)


def _write(path: str | os.PathLike[str], text: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise RunError(f"{str(path)!r} cannot be written: {in_words(error)}") from error


def ordered(rows: Iterable[Row]) -> tuple[Row, ...]:
    """Rows, most expensive first."""
    return tuple(sorted(rows, key=lambda row: (-row.seconds, row.phase, row.scope)))
