"""The small sets of choices that a configuration has."""

import enum


class SelectionOrder(enum.Enum):
    """In which order the devices of a program are taken; placement only, no result changes.

    AUTO: snake where a pipeline uses the default mapping, else zigzag. ZIGZAG: 0, 1, 2, 3, ...
    SNAKE: 0, 1, 3, 2, 4, 5, 7, 6, ... HOOF: even numbers upwards, then odd ones downwards.
    """

    AUTO = 0
    ZIGZAG = 1
    SNAKE = 2
    HOOF = 3

    def order(self, count: int) -> list[int]:
        """The numbers 0 to count - 1 in this order.

        >>> SelectionOrder.SNAKE.order(8), SelectionOrder.HOOF.order(6)
        ([0, 1, 3, 2, 4, 5, 7, 6], [0, 2, 4, 5, 3, 1])
        """
        numbers = list(range(count))
        if self is SelectionOrder.SNAKE:
            pairs = [numbers[i : i + 2] for i in range(0, count, 2)]
            return [n for i, pair in enumerate(pairs) for n in (pair[::-1] if i % 2 else pair)]
        if self is SelectionOrder.HOOF:
            return numbers[::2] + numbers[1::2][::-1]
        return numbers


class ExecutionProfileType(enum.Enum):
    """What the original's execution profile held; accepted, and without effect here."""

    NO_PROFILE = 0
    DEVICE_PROFILE = 1
    IPU_PROFILE = 2
    TILE_PROFILE = 3


class DeviceConnectionType(enum.Enum):
    """When a process took hold of its devices; here it has them from the start."""

    ALWAYS = 0
    ON_DEMAND = 1
    PRE_COMPILE = 2
    NEVER = 3


class MergeRemoteBuffersBehaviour(enum.Enum):
    """Whether buffers in remote memory were merged."""

    NO_MERGING = 0
    MERGE = 1
    IF_BENEFICIAL = 2


class SchedulingAlgorithm(enum.Enum):
    """How the original's compiler ordered operations."""

    CHOOSE_BEST = 0
    CLUSTERING = 1
    POST_ORDER = 2
    LOOK_AHEAD = 3
    SHORTEST_PATH = 4


class StochasticRoundingBehaviour(enum.Enum):
    """Whether float16 results were rounded stochastically."""

    OFF = 0
    ON = 1
    REPLICA_IDENTICAL_ONLY = 2

    @classmethod
    def from_bool(cls, value: bool) -> "StochasticRoundingBehaviour":
        """ON or OFF."""
        return cls.ON if value else cls.OFF
