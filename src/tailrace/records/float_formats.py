"""The effect of narrower number formats on a tensor, from its histogram of exponents.

A histogram (`reduce="histogram"`) counts values by binary exponent. The limits of a format are, up to
rounding, powers of two, so one histogram serves every format, and every scaling by a power of two,
after the run. Where the bins are ambiguous, the result is a bound, never a guess.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from tailrace.errors import OptionError
from tailrace.taps.reductions import INF_BIN, NUM_BINS, SUBNORMAL

_BIAS = 127
_LEAST_FLOAT32 = -149
"""The exponent of the smallest value in a histogram."""

SHARES = np.dtype(
    [
        ("underflow", np.float64),
        ("underflow_most", np.float64),
        ("subnormal", np.float64),
        ("overflow", np.float64),
        ("overflow_most", np.float64),
    ]
)
"""Fractions of a tensor's values; see `format_shares`."""


@dataclasses.dataclass(frozen=True)
class NumberFormat:
    """A binary floating-point format.

    Attributes:
        name: the name of the dtype.
        least_exponent: the smallest normal value is 2 to this power.
        mantissa_bits: stored bits of the mantissa.
        largest: the largest finite value.
    """

    name: str
    least_exponent: int
    mantissa_bits: int
    largest: float

    @property
    def smallest(self) -> float:
        """The smallest positive value, a subnormal one."""
        return 2.0 ** (self.least_exponent - self.mantissa_bits)

    @property
    def smallest_normal(self) -> float:
        """The smallest positive value with full precision."""
        return 2.0**self.least_exponent


FORMATS = (
    NumberFormat("float16", -14, 10, 65504.0),
    NumberFormat("bfloat16", -126, 7, (2 - 2.0**-7) * 2.0**127),
    NumberFormat("float8_e4m3fn", -6, 3, 448.0),
    NumberFormat("float8_e5m2", -14, 2, 57344.0),
)
"""The formats of `format_shares`."""


def format_shares(histogram: npt.ArrayLike, scale_exponent: int = 0) -> dict[str, np.ndarray]:
    """The fraction of values that a cast to each narrow format would lose, by the format's name.

    Let the format's smallest value be s, its smallest normal value n and its largest value m, and
    let casts round to the nearest value (ties to even). Of all values, zeros and others included:

    * `underflow`: not zero, but zero after the cast: below s/2. Exact, except that a value of
      exactly s/2, which becomes zero too, is counted as subnormal.
    * `underflow_most`: an upper bound. It differs if float32's subnormal values, which share one bin,
      may or may not vanish: for bfloat16, or scaled by a large power of two.
    * `subnormal`: at least s/2 and below n, so only part of the digits survive. Values are classified
      before rounding: the largest of them round up to n.
    * `overflow`: finite, but certainly beyond m after rounding: 2^(e+1) or more, where m has the
      exponent e. The cast makes them Inf, NaN or m, depending on the format and the machine.
    * `overflow_most`: an upper bound that also counts all values with m's exponent.

    Args:
        histogram: counts, `[..., 258]`, as a tap with `reduce="histogram"` records them. Leading
            dims are kept.
        scale_exponent: multiply by 2 to this power first, as a loss scale would.

    Returns:
        For each format a structured array with the leading dims of `histogram`.

    Raises:
        OptionError: it is not a histogram, or `scale_exponent` is not a whole number.

    >>> import numpy as np
    >>> from tailrace.records.float_formats import format_shares
    >>> counts = np.zeros(258, int)
    >>> counts[127], counts[127 - 30] = 3, 1  # three values from 1 to 2, one of about 1e-9
    >>> float(format_shares(counts)["float16"]["underflow"])
    0.25
    >>> float(format_shares(counts, scale_exponent=10)["float16"]["underflow"])
    0.0
    """
    counts = np.asarray(histogram).astype(np.float64)
    if not counts.shape or counts.shape[-1] != NUM_BINS:
        raise OptionError(
            f"A histogram has {NUM_BINS} bins in its last dim, as Tap(..., reduce='histogram') "
            f"records them. Received: shape {counts.shape}."
        )
    if isinstance(scale_exponent, bool) or not isinstance(scale_exponent, int | np.integer):
        raise OptionError(
            f"scale_exponent is a whole number: values are multiplied by 2**scale_exponent. "
            f"Received: {scale_exponent!r}."
        )
    total = counts.sum(axis=-1)
    shares = counts / np.maximum(total, 1)[..., None]
    return {form.name: _shares(form, shares, int(scale_exponent)) for form in FORMATS}


def _shares(form: NumberFormat, shares: np.ndarray, scale: int) -> np.ndarray:
    # The exponents of the values in each bin, lowest and highest, after scaling.
    low = np.arange(SUBNORMAL, INF_BIN) - _BIAS + scale
    high = low.copy()
    low[SUBNORMAL] = _LEAST_FLOAT32 + scale  # all subnormal values of float32 share one bin
    finite = shares[..., SUBNORMAL:INF_BIN]
    # Half of the smallest value: from there on a value is rounded up to it.
    survives = form.least_exponent - form.mantissa_bits - 1
    # The exponent of the largest value. A histogram does not say where in its bin a value is, so
    # values with this exponent may or may not overflow.
    top = int(np.frexp(form.largest)[1]) - 1

    def share(bins: np.ndarray) -> np.ndarray:
        return finite[..., bins].sum(axis=-1)

    # Certain if the whole bin is beyond a limit, possible (`_most`) if some of its values may be.
    out = np.empty(shares.shape[:-1], SHARES)
    out["underflow"] = share(high < survives)
    out["underflow_most"] = share(low < survives)
    out["subnormal"] = share((high >= survives) & (high < form.least_exponent))
    out["overflow"] = share(low > top)
    out["overflow_most"] = share(high >= top)
    return out
