"""`popdist.tensorflow`: the configuration of this process's devices."""

from __future__ import annotations

from tailrace.compat import popdist
from tailrace.compat.ipu.config import IPUConfig


def set_ipu_config(
    config: IPUConfig, ipus_per_replica: int = 1, configure_device: bool = True
) -> None:
    """Let a configuration take the devices of this process's replicas.

    Args:
        config: an `IPUConfig`.
        ipus_per_replica: how many devices a replica has.
        configure_device: whether to choose devices; False changes nothing.

    Raises:
        OptionError: the environment's number of replicas is not a number.

    >>> from tailrace.compat import ipu, popdist
    >>> cfg = ipu.config.IPUConfig()
    >>> popdist.tensorflow.set_ipu_config(cfg, ipus_per_replica=2)
    >>> cfg.auto_select_ipus
    2
    """
    if configure_device:
        config.auto_select_ipus = popdist.getNumLocalReplicas() * ipus_per_replica
