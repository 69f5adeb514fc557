"""The small sets of choices that a configuration has."""

import enum


class SelectionOrder(enum.Enum):
    """The order in which the devices of a program are used; placement only, no result changes.

    AUTO and ZIGZAG: 0, 1, 2, 3, ... SNAKE: 0, 1, 3, 2, 4, 5, 7, 6, ... HOOF: even numbers upwards, then
    odd ones downwards.

    >>> from tailrace.compat import ipu
    >>> ipu.config.SelectionOrder.SNAKE.order(8)
    [0, 1, 3, 2, 4, 5, 7, 6]
    """

    AUTO = 0
    ZIGZAG = 1
    SNAKE = 2
    HOOF = 3

    def order(self, count: int) -> list[int]:
        """The numbers 0 to count - 1 in this order.

        Args:
            count: how many devices there are.

        >>> from tailrace.compat import ipu
        >>> ipu.config.SelectionOrder.HOOF.order(6)
        [0, 2, 4, 5, 3, 1]
        """
        numbers = list(range(count))
        if self is SelectionOrder.SNAKE:
            pairs = [numbers[i : i + 2] for i in range(0, count, 2)]
            return [n for i, pair in enumerate(pairs) for n in (pair[::-1] if i % 2 else pair)]
        if self is SelectionOrder.HOOF:
            return numbers[::2] + numbers[1::2][::-1]
        return numbers


class ExecutionProfileType(enum.Enum):
    """What the original's execution profile contained; accepted, without effect.

    NO_PROFILE, DEVICE_PROFILE, IPU_PROFILE or TILE_PROFILE. `tr.trace` and `trainer.profile` measure
    programs here.

    >>> from tailrace.compat import ipu
    >>> ipu.config.ExecutionProfileType.NO_PROFILE.value
    0
    """

    NO_PROFILE = 0
    DEVICE_PROFILE = 1
    IPU_PROFILE = 2
    TILE_PROFILE = 3


class DeviceConnectionType(enum.Enum):
    """When the original attached its devices: ALWAYS, ON_DEMAND, PRE_COMPILE or NEVER.

    Here a process has its devices from the start. PRE_COMPILE and NEVER are refused by
    `configure_ipu_system`: a program is compiled for the devices that run it.

    >>> from tailrace.compat import ipu
    >>> cfg = ipu.config.IPUConfig()
    >>> cfg.device_connection.type = ipu.config.DeviceConnectionType.ON_DEMAND
    """

    ALWAYS = 0
    ON_DEMAND = 1
    PRE_COMPILE = 2
    NEVER = 3


class MergeRemoteBuffersBehaviour(enum.Enum):
    """Whether the original merged buffers in remote memory: NO_MERGING, MERGE or IF_BENEFICIAL.

    Checked, without effect.

    >>> from tailrace.compat import ipu
    >>> merge = ipu.config.MergeRemoteBuffersBehaviour.MERGE
    >>> ipu.config.IPUConfig().optimizations.merge_remote_buffers = merge
    """

    NO_MERGING = 0
    MERGE = 1
    IF_BENEFICIAL = 2


class SchedulingAlgorithm(enum.Enum):
    """How the original's compiler ordered operations; checked, without effect.

    CHOOSE_BEST, CLUSTERING, POST_ORDER, LOOK_AHEAD or SHORTEST_PATH.

    >>> from tailrace.compat import ipu
    >>> algorithm = ipu.config.SchedulingAlgorithm.CLUSTERING
    >>> ipu.config.IPUConfig().scheduling.algorithm = algorithm
    """

    CHOOSE_BEST = 0
    CLUSTERING = 1
    POST_ORDER = 2
    LOOK_AHEAD = 3
    SHORTEST_PATH = 4


class StochasticRoundingBehaviour(enum.Enum):
    """Whether float16 results were rounded stochastically: OFF, ON or REPLICA_IDENTICAL_ONLY.

    Checked, without effect: results are rounded to the nearest.

    >>> from tailrace.compat import ipu
    >>> ipu.config.StochasticRoundingBehaviour.from_bool(True).name
    'ON'
    """

    OFF = 0
    ON = 1
    REPLICA_IDENTICAL_ONLY = 2

    @classmethod
    def from_bool(cls, value: bool) -> "StochasticRoundingBehaviour":
        """ON for True, OFF for False.

        Args:
            value: whether to round stochastically.
        """
        return cls.ON if value else cls.OFF
