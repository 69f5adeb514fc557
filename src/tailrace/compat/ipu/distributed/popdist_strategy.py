"""`PopDistStrategy`: models whose replicas belong to several processes."""

from __future__ import annotations

from tailrace.compat import popdist
from tailrace.compat.ipu.config import IPUConfig
from tailrace.compat.ipu.ipu_strategy import IPUStrategyV1
from tailrace.compat.originals.missing import missing_from


class PopDistStrategy(IPUStrategyV1):
    """An `IPUStrategy` in each of several processes, which together train one model.

    Processes are joined by `tailrace launch` or `tr.distributed.initialize`; `popdist` says which one
    this is.

    Args:
        ipu_device: the logical device.
        add_ipu_cross_replica_reductions: without effect: gradients are averaged over all replicas.
        enable_dataset_iterators: see `IPUStrategyV1`.
        enable_keras_extensions: see `IPUStrategyV1`.

    Raises:
        IPUValueError: `ipu_device` does not name a logical device.

    >>> from tailrace.compat import ipu
    >>> strategy = ipu.distributed.popdist_strategy.PopDistStrategy()
    >>> strategy.num_replicas_in_sync  # of this process alone
    1
    """

    def __init__(
        self,
        ipu_device: str = "/device:IPU:0",
        add_ipu_cross_replica_reductions: bool = True,
        enable_dataset_iterators: bool = True,
        enable_keras_extensions: bool = True,
    ) -> None:
        del add_ipu_cross_replica_reductions
        super().__init__(
            ipu_device,
            enable_dataset_iterators=enable_dataset_iterators,
            enable_keras_extensions=enable_keras_extensions,
        )

    @property
    def num_replicas_in_sync(self) -> int:  # type: ignore[override]
        """How many replicas all processes have."""
        return popdist.getNumTotalReplicas()

    def update_ipu_config(self, config: IPUConfig) -> None:
        """Let a configuration take the devices of this process's replicas.

        Args:
            config: an `IPUConfig`.
        """
        config.auto_select_ipus = popdist.getNumLocalReplicas()


__getattr__, __dir__ = missing_from(__name__)
