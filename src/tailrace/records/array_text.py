"""Arrays as text, laid out as `tr.print_tensor` prints them.

`numpy.array2string` does not do it: its brackets are always square and on the lines of their values,
and its digits are those behind the point. Here both are options, those of `poptorch.ipu_print_tensor`.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from typing import Any

import numpy as np

from tailrace.base.array_like import DTypeLike
from tailrace.base.checks import member_named, member_of
from tailrace.errors import OptionError

_ELLIPSIS = "..."


class FloatFormat(enum.StrEnum):
    """The notation of floats: fixed, scientific, whichever fits, or Python's."""

    AUTO = "auto"
    FIXED = "fixed"
    SCIENTIFIC = "scientific"
    NONE = "none"

    @classmethod
    def _missing_(cls, value: object) -> FloatFormat:
        return member_named(cls, value, "float_format")


@dataclasses.dataclass(frozen=True)
class PrintOptions:
    """The layout of a printed array.

    Args:
        summarise_threshold: arrays with more values than this show only their edges; 0 shows all values
            of every array.
        edge_items: the number of values shown at each end of a summarised dim.
        max_line_width: a longer row continues in the next line; 0 never breaks a row.
        digits: the digits of a float, including those before the point; 0 for Python's notation,
            unaligned.
        float_format: "auto", "fixed", "scientific" or "none".
        separator: the text between two values of a row.
        open_bracket: the text at the start of a dim.
        close_bracket: the text at its end.

    >>> print(PrintOptions(digits=3).format(np.float32([1, 2.5]), "x"))
    x: (1.00, 2.50)
    """

    summarise_threshold: int = 1000
    edge_items: int = 3
    max_line_width: int = 80
    digits: int = 4
    float_format: FloatFormat | str = FloatFormat.AUTO
    separator: str = ", "
    open_bracket: str = "("
    close_bracket: str = ")"

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise OptionError(
                    f"{name} is a whole number of at least {least}. Received: {name}={value!r}."
                )
        if self.digits > MOST_DIGITS:
            raise OptionError(
                f"digits is at most {MOST_DIGITS}: no float has more. Received: digits={self.digits!r}."
            )
        for name in ("separator", "open_bracket", "close_bracket"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value or "\n" in value:
                raise OptionError(
                    f"{name} is a string of at least one character, without a line break. "
                    f"Received: {name}={value!r}."
                )
        object.__setattr__(self, "float_format", member_of(FloatFormat, self.float_format))

    def format(self, array: object, title: str = "") -> str:
        """An array as text, after `title: ` if there is a title."""
        values = np.asarray(array)
        head = f"{title}: " if title else ""
        if values.ndim == 0:
            return head + self._writer(values)(values[()])
        shown = self._edges(values.shape, bool(self._is_summarised(values)))
        # Only what is shown is formatted: of a billion values, a few dozen.
        kept = values[np.ix_(*([i for i in dim if i is not None] for dim in shown))]
        # The width of a value follows from the shown ones: one large number in a part that is left out
        # must not widen the others.
        write = self._writer(kept)
        return head + "\n".join(self._lines(values, shown, write, 0, len(head)))

    # -- which values ---------------------------------------------------------------------------

    def _is_summarised(self, values: np.ndarray) -> bool:
        return bool(self.summarise_threshold) and values.size > self.summarise_threshold

    def _edges(self, shape: tuple[int, ...], summarised: bool) -> list[list[int | None]]:
        """For each dim the indices to show; None marks an omission."""
        edge = self.edge_items
        return [
            [*range(edge), None, *range(size - edge, size)]
            if summarised and size > 2 * edge
            else list(range(size))
            for size in shape
        ]

    # -- layout ---------------------------------------------------------------------------------

    def _lines(
        self,
        values: np.ndarray,
        shown: list[list[int | None]],
        write: Callable[[Any], str],
        indent: int,
        taken: int,
    ) -> list[str]:
        """The lines of an array; the first one without its indent, since `taken` columns are used."""
        if len(shown) == 1:
            return self._row(values, shown[0], write, indent, taken)
        lines = [self.open_bracket]
        for index in shown[0]:
            inside = indent + 1
            pad = " " * inside
            if index is None:
                lines.append(pad + _ELLIPSIS)
                continue
            first, *rest = self._lines(values[index], shown[1:], write, inside, inside)
            lines += [pad + first, *rest]
        return [*lines, " " * indent + self.close_bracket]

    def _row(
        self,
        values: np.ndarray,
        shown: list[int | None],
        write: Callable[[Any], str],
        indent: int,
        taken: int,
    ) -> list[str]:
        """One row, broken after separators where it would become too long."""
        words = [_ELLIPSIS if index is None else write(values[index]) for index in shown]
        lines, line = [], " " * taken + self.open_bracket
        start = len(line)
        for number, word in enumerate(words):
            last = number == len(words) - 1
            behind = self.close_bracket if last else self.separator
            # Without the space after a separator, which a broken line does not have.
            too_long = len(line + word + behind.rstrip()) > self.max_line_width > 0
            if too_long and len(line) > start:
                lines.append(line.rstrip())
                line = " " * (indent + 2)
                start = len(line)
            line += word + ("" if last else self.separator)
        lines.append(line + self.close_bracket)
        # The first line was started with spaces in place of what the caller prints before it.
        return [lines[0][taken:], *lines[1:]]

    # -- one value ------------------------------------------------------------------------------

    def _writer(self, shown: np.ndarray) -> Callable[[Any], str]:
        """A function that formats a value such that all shown values have the same width."""
        write = self._unaligned(shown)
        raw = self.float_format is FloatFormat.NONE or self.digits == 0
        # Python's notation has as many digits as a value needs, so there is no common width.
        if raw and _is_float(shown.dtype):
            return write
        width = max((len(write(value)) for value in shown.ravel()), default=0)
        return lambda value: write(value).rjust(width)

    def _unaligned(self, shown: np.ndarray) -> Callable[[Any], str]:
        if not _is_float(shown.dtype):
            return str
        if self.float_format is FloatFormat.NONE or self.digits == 0:
            return lambda value: repr(_plain(value))
        finite = np.abs(shown.astype(_wide(shown.dtype)).ravel())
        finite = finite[np.isfinite(finite)]
        largest = float(finite.max()) if finite.size else 0.0
        # Places before the point, of the largest value: all shown values get as many decimals as
        # are left.
        whole = len(str(int(largest)))
        if self._is_scientific(largest, whole):
            return lambda value: f"{_plain(value):.{self.digits - 1}e}"
        return lambda value: f"{_plain(value):.{max(self.digits - whole, 0)}f}"

    def _is_scientific(self, largest: float, whole: int) -> bool:
        if self.float_format is not FloatFormat.AUTO:
            return self.float_format is FloatFormat.SCIENTIFIC
        # Fixed notation would need more digits than available, or show mostly zeros.
        return whole > self.digits or 0 < largest < min(1.0, 10.0 ** (2 - self.digits))


MOST_DIGITS = 1_100
"""A float64 written out has 1,075 digits at most."""

_LEAST = {"summarise_threshold": 0, "edge_items": 1, "max_line_width": 0, "digits": 0}


def format_tensor(
    array: object,
    title: str = "",
    summarise_threshold: int = 1000,
    edge_items: int = 3,
    max_line_width: int = 80,
    digits: int = 4,
    float_format: FloatFormat | str = FloatFormat.AUTO,
    separator: str = ", ",
    open_bracket: str = "(",
    close_bracket: str = ")",
) -> str:
    """An array as text; see `PrintOptions` for the arguments.

    A row is on one line, if it fits. With two dims or more, brackets around rows are on separate lines
    and each level is indented by one space.

    >>> print(format_tensor(np.int32([[1, 20], [3, 4]]), "x", separator=" "))
    x: (
     ( 1 20)
     ( 3  4)
    )
    """
    options = PrintOptions(
        summarise_threshold,
        edge_items,
        max_line_width,
        digits,
        float_format,
        separator,
        open_bracket,
        close_bracket,
    )
    return options.format(array, title)


def _is_float(dtype: DTypeLike) -> bool:
    # NumPy does not treat the narrow floats (bfloat16, float8) as floats: their kind is "V".
    return dtype.kind in "fcV"


def _wide(dtype: DTypeLike) -> Any:
    return np.complex128 if dtype.kind == "c" else np.float64


def _plain(value: Any) -> Any:
    return complex(value) if np.asarray(value).dtype.kind == "c" else float(value)
