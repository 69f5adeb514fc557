"""What the original kept in `utils`: questions, seeds, and the names of `config` from before it."""

from __future__ import annotations

from tailrace.base.messages import note_once
from tailrace.compat.ipu.config import DeviceConnectionType as DeviceConnectionType
from tailrace.compat.ipu.config import ExecutionProfileType as ExecutionProfileType
from tailrace.compat.ipu.config import IPUConfig as IPUConfig
from tailrace.compat.ipu.config import MergeRemoteBuffersBehaviour as MergeRemoteBuffersBehaviour
from tailrace.compat.ipu.config import SchedulingAlgorithm as SchedulingAlgorithm
from tailrace.compat.ipu.config import SelectionOrder as SelectionOrder
from tailrace.compat.ipu.config import StochasticRoundingBehaviour as StochasticRoundingBehaviour
from tailrace.compat.ipu.config import configure_ipu_system as configure_ipu_system
from tailrace.compat.ipu.config import get_ipu_config as get_ipu_config
from tailrace.compat.ipu.config import group
from tailrace.compat.ipu.config import reset_ipu_configuration as reset_ipu_configuration
from tailrace.compat.ipu.config import running_on_ipu_model as running_on_ipu_model
from tailrace.compat.ipu.errors import IPUNotImplementedError, IPUTypeError
from tailrace.compat.ipu.graph.seeding import reseed
from tailrace.compat.ipu.scopes import ordinal_of
from tailrace.compat.originals.missing import missing_from


def get_num_of_ipus_in_device(ipu_device: str | int, device: str = "cpu") -> int:
    """How many devices a logical device has; one if nothing is configured.

    Args:
        ipu_device: `"/device:IPU:0"`, or the number of the logical device.
        device: without effect.

    Raises:
        IPUValueError: it does not name a logical device.
        DeviceError: there is no logical device of this number.

    >>> from tailrace.compat import ipu
    >>> ipu.utils.get_num_of_ipus_in_device("/device:IPU:0")
    1
    """
    del device
    return len(group(ordinal_of(ipu_device)))


def reset_ipu_seed(
    seed: int,
    device: str | int = "/device:IPU:0",
    cpu_device: str = "cpu",
    experimental_identical_replicas: bool = False,
) -> None:
    """Let programs draw random numbers from this seed, from the beginning.

    Args:
        seed: the seed of `ops.rand_ops.dropout` and of `tr.key()`. Keras has its own:
            `keras.utils.set_random_seed`.
        device: checked; there is one seed for all.
        cpu_device: without effect.
        experimental_identical_replicas: refused: replicas draw different numbers.

    Raises:
        IPUTypeError: the seed is not an integer.
        IPUNotImplementedError: replicas are to draw the same numbers.

    >>> from tailrace.compat import ipu
    >>> drop = ipu.ipu_compiler.compile(lambda: ipu.ops.rand_ops.dropout([1.0] * 8))
    >>> ipu.utils.reset_ipu_seed(1)
    >>> first = drop()[0].tolist()
    >>> ipu.utils.reset_ipu_seed(1)
    >>> drop()[0].tolist() == first
    True
    """
    del cpu_device
    # Checked, so that a misspelled device is found here and not when the program is moved back.
    ordinal_of(device)
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise IPUTypeError(f"A seed is an integer. Received: {seed!r}.")
    if experimental_identical_replicas:
        raise IPUNotImplementedError(
            "experimental_identical_replicas: replicas draw different numbers here. Give dropout a "
            "seed=, which is the same on all of them."
        )
    reseed(seed)


def move_variable_initialization_to_cpu(graph: object = None) -> None:
    """Without effect: variables are created on the host.

    Args:
        graph: without effect.

    >>> from tailrace.compat import ipu
    >>> ipu.utils.move_variable_initialization_to_cpu()
    """
    del graph
    note_once("move_variable_initialization_to_cpu has no effect: variables are made on the host.")


def use_synthetic_data_for(synthetic_data_category: object) -> bool:
    """Whether data of a kind is made up: always False. Programs compute on the data they are given.

    Args:
        synthetic_data_category: without effect.

    >>> from tailrace.compat import ipu
    >>> ipu.utils.use_synthetic_data_for(None)
    False
    """
    del synthetic_data_category
    return False


__getattr__, __dir__ = missing_from(__name__)
