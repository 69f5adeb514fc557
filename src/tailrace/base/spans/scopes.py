"""The named scopes around Tailrace's own operations, by which a profile identifies them."""

ACCUMULATION = "tailrace.accumulation"
REPLICAS = "tailrace.replicas"
STAGES = "tailrace.stages"
FEEDS = "tailrace.feeds"
TAPS = "tailrace.taps"
OPTIMIZER = "optimizer"
LOSS_AGAIN = "loss_again"
"""A loss that an optimizer evaluates again, with the keys of the first time."""
STASH = "tailrace.stash"
"""The buffers in which stages keep values for their backward."""


def unit_scope(kind: str, stage: int, member: int) -> str:
    """The scope around the forward ("F") or backward ("B") of a member of a stage.

    >>> unit_scope("F", 2, 0)
    'tailrace.unit.F2.0'
    """
    return f"tailrace.unit.{kind}{stage}.{member}"
