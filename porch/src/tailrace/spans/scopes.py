"""The scopes that Tailrace opens around operations of its own, so that a profile can tell them."""

ACCUMULATION = "tailrace.accumulation"
REPLICAS = "tailrace.replicas"
STAGES = "tailrace.stages"
FEEDS = "tailrace.feeds"
TAPS = "tailrace.taps"
OPTIMIZER = "optimizer"


def unit_scope(kind: str, stage: int, member: int) -> str:
    """The scope around the forward ("F") or backward ("B") of a member of a stage.

    >>> unit_scope("F", 2, 0)
    'tailrace.unit.F2.0'
    """
    return f"tailrace.unit.{kind}{stage}.{member}"
