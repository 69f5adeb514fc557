"""What the original kept in `utils`: the names of `config` from before that existed."""

from typing import Any

from tailrace.compat.ipu.config import DeviceConnectionType as DeviceConnectionType
from tailrace.compat.ipu.config import ExecutionProfileType as ExecutionProfileType
from tailrace.compat.ipu.config import IPUConfig as IPUConfig
from tailrace.compat.ipu.config import MergeRemoteBuffersBehaviour as MergeRemoteBuffersBehaviour
from tailrace.compat.ipu.config import SchedulingAlgorithm as SchedulingAlgorithm
from tailrace.compat.ipu.config import SelectionOrder as SelectionOrder
from tailrace.compat.ipu.config import StochasticRoundingBehaviour as StochasticRoundingBehaviour
from tailrace.compat.ipu.config import configure_ipu_system as configure_ipu_system
from tailrace.compat.ipu.config import get_ipu_config as get_ipu_config
from tailrace.compat.ipu.config import reset_ipu_configuration as reset_ipu_configuration


def create_ipu_config(*_: Any, **__: Any) -> None:
    """Refused: gone from the original as well, in favour of `IPUConfig`."""
    from tailrace.compat.ipu.errors import IPURuntimeError

    raise IPURuntimeError(
        "create_ipu_config was removed from the original in favour of the configuration object: "
        "cfg = ipu.config.IPUConfig(); cfg.auto_select_ipus = 1; cfg.configure_ipu_system()."
    )
