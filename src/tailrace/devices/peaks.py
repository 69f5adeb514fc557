"""The peak performance of devices: the denominator of MFU."""

from __future__ import annotations

PEAKS = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "V100": 125e12,
    "T4": 65e12,
    "TPU v6 lite": 918e12,
    "TPU v5p": 459e12,
    "TPU v5 lite": 197e12,
    "TPU v5": 459e12,
    "TPU v4": 275e12,
    "TPU v3": 123e12,
}
"""16-bit FLOPs per second of one device, without sparsity, by the vendors' data sheets."""


def peak_of(kind: str) -> float | None:
    """The peak FLOPs of a device kind, as JAX names it; None if unknown.

    >>> peak_of("NVIDIA H200"), peak_of("cpu")
    (989000000000000.0, None)
    """
    # The first that fits, so that longer names come first in the table: "TPU v5p" before "TPU v5".
    return next((peak for name, peak in PEAKS.items() if name in kind), None)
