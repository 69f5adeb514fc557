"""Which PyTorch and which torchax go together."""

from __future__ import annotations

import importlib.metadata

from tailrace.errors import MissingDependency, OptionError

TORCH = ((2, 11), (2, 14))
"""PyTorch: from, and below."""

TORCHAX = ((0, 0, 13), (0, 0, 14))
"""torchax: from, and below. It is young, and each release changes what this package relies on."""


def check_installed() -> None:
    """Refuse to go on if PyTorch or torchax is missing, or the two do not go together."""
    check_pair(_version("torch"), _version("torchax"))


def check_pair(torch: str | None, torchax: str | None) -> None:
    """Refuse a pair of versions that is not known to work.

    >>> check_pair("2.13.0+cpu", "0.0.13")
    """
    if torch is None:
        raise MissingDependency.for_feature("tailrace.torch", "torch", "torch")
    if torchax is None:
        raise MissingDependency.for_feature("tailrace.torch", "torchax", "torch")
    fits = _within(torch, *TORCH) and _within(torchax, *TORCHAX)
    if not fits:
        raise OptionError(
            f"{together()} Received: torch {torch}, torchax {torchax}. Install a pair that "
            f"goes together: pip install 'tailrace[torch]'."
        )


def together() -> str:
    """The one sentence about which versions go together.

    >>> together()
    'tailrace.torch works with torch >=2.11,<2.14 together with torchax >=0.0.13,<0.0.14.'
    """
    return (
        f"tailrace.torch works with torch {_shown(TORCH)} together with torchax {_shown(TORCHAX)}."
    )


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _within(version: str, least: tuple[int, ...], below: tuple[int, ...]) -> bool:
    numbers = tuple(
        int("".join(c for c in part if c.isdigit()) or 0)
        for part in version.split("+")[0].split(".")[:3]
    )
    return least <= numbers and numbers[: len(below)] < below


def _shown(limits: tuple[tuple[int, ...], tuple[int, ...]]) -> str:
    least, below = (".".join(map(str, part)) for part in limits)
    return f">={least},<{below}"
