"""The seed of the keys that programs draw, `ipu.utils.reset_ipu_seed`."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Seeding:
    """A seed, and how often one was given: giving the same one again restarts its numbers."""

    seed: int = 0
    count: int = 0


# Compiled programs hold their seed: it is part of the key by which they are found again.
_now = Seeding()


def seeding() -> Seeding:
    """The one in force."""
    return _now


def reseed(seed: int) -> None:
    """Let programs draw from another seed, or from the same one again."""
    global _now
    _now = Seeding(seed, _now.count + 1)
