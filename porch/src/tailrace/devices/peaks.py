"""What devices can compute at most: the denominator of a share of the peak (MFU)."""

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
"""Floating-point operations a second of one device, 16 bits, without sparsity, as their makers say."""


def peak_of(kind: str) -> float | None:
    """The peak of a kind of device, as JAX names it; None if it is not known.

    >>> peak_of("NVIDIA H200"), peak_of("cpu")
    (989000000000000.0, None)
    """
    return next((peak for name, peak in PEAKS.items() if name in kind), None)
