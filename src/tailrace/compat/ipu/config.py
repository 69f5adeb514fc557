"""`IPUConfig`: the devices of a program, with the original's interface.

    cfg = IPUConfig()
    cfg.auto_select_ipus = 2
    cfg.configure_ipu_system()

The number of replicas is not an option: it is the devices divided by those one copy of the program
needs (1; for a pipeline its stages, rounded up to a power of two). A system may be configured again
and again; each time the devices are chosen from those of the process.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any

from tailrace.base.messages import logger, note_once
from tailrace.compat.ipu.errors import (
    FailedPreconditionError,
    InternalError,
    IPURuntimeError,
    IPUValueError,
)
from tailrace.compat.ipu.settings.choices import DeviceConnectionType as DeviceConnectionType
from tailrace.compat.ipu.settings.choices import ExecutionProfileType as ExecutionProfileType
from tailrace.compat.ipu.settings.choices import (
    MergeRemoteBuffersBehaviour as MergeRemoteBuffersBehaviour,
)
from tailrace.compat.ipu.settings.choices import SchedulingAlgorithm as SchedulingAlgorithm
from tailrace.compat.ipu.settings.choices import SelectionOrder as SelectionOrder
from tailrace.compat.ipu.settings.choices import (
    StochasticRoundingBehaviour as StochasticRoundingBehaviour,
)
from tailrace.compat.ipu.settings.config_tree import Category, Option, plain, restored
from tailrace.compat.ipu.settings.options import OPTIONS
from tailrace.compat.originals.missing import missing_from
from tailrace.devices import devices
from tailrace.devices.environment import TOO_LATE, asked_devices
from tailrace.errors import DeviceError, TailraceError


class ConfigurationError(TailraceError, Exception):
    """Options that exclude each other."""


@dataclasses.dataclass(frozen=True)
class AttributeMetadata:
    """What `get_attribute_metadata` returns about an option.

    Attributes:
        name: its full name.
        types: the classes that a value may have.
        default: the value it starts with.
        deprecated: whether another option replaces it.
        doc: what it means.

    >>> from tailrace.compat import ipu
    >>> about = ipu.config.IPUConfig().get_attribute_metadata("allow_recompute")
    >>> about.type, about.default
    (<class 'bool'>, False)
    """

    name: str
    types: tuple[type, ...]
    default: Any
    deprecated: bool
    doc: str

    @property
    def type(self) -> Any:
        """The class that a value may have, or all of them."""
        return self.types[0] if len(self.types) == 1 else self.types


class _OnClassOrObject:
    """A method that fills the object it is called on, or a new one if called on the class."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.__doc__ = function.__doc__

    def __get__(self, obj: object, owner: Callable[[], Any]) -> Any:
        # The original's programs write both: `IPUConfig.from_dict(d)` and `cfg.from_dict(d)`.
        return self._function.__get__(owner() if obj is None else obj)


class IPUConfig(Category):
    """A tree of typed options; nothing happens before `configure_ipu_system`.

    Four options have an effect: `auto_select_ipus`, `select_ipus`, `selection_order` and
    `allow_recompute`. The others describe the chip, its compiler or its memory: they are checked, kept
    and noted once in the log.

    Raises:
        IPUValueError: an option that does not exist is read or set.
        IPUTypeError: a value has the wrong type.

    >>> from tailrace.compat import ipu
    >>> cfg = ipu.config.IPUConfig()
    >>> cfg.auto_select_ipus = 2
    >>> cfg.configure_ipu_system()
    >>> ipu.utils.get_num_of_ipus_in_device("/device:IPU:0")
    2
    >>> cfg.auto_select_ipu = 2  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    tailrace.compat.ipu.errors.IPUValueError: ... Did you mean 'auto_select_ipus'?
    >>> ipu.config.reset_ipu_configuration()
    """

    def __init__(self) -> None:
        super().__init__(OPTIONS)

    def configure_ipu_system(self, device: str = "cpu") -> None:
        """Use the devices that this configuration describes from now on.

        Args:
            device: where the original ran the operation that did this; without effect.

        Raises:
            IPUValueError: an option breaks one of its rules.
            DeviceError: there are fewer devices than it asks for.
        """
        configure_ipu_system(self, device)

    def get_attribute_metadata(self, name: str) -> AttributeMetadata:
        """Type, default and meaning of the option with this full name.

        Args:
            name: the full name, such as `io_tiles.num_io_tiles`.

        Raises:
            IPUValueError: there is no such option.
        """
        for full, option, _ in self.options():
            if full == name:
                return AttributeMetadata(
                    full, option.types, option.default, option.deprecated, option.doc
                )
        raise IPUValueError(f"Could not get attribute metadata for '{name}'. {self._unknown(name)}")

    def to_dict(self) -> dict[str, Any]:
        """All options by their full name, enums as integers."""
        return {name: plain(value) for name, _, value in self.options()}

    def to_json(self) -> str:
        """`to_dict` as JSON."""
        return json.dumps(self.to_dict())

    def _set(self, values: dict[str, Any]) -> IPUConfig:
        declared = {name: option for name, option, _ in self.options()}
        for name, value in _flattened(values).items():
            *categories, key = name.split(".")
            holder: Any = self
            for category in categories:
                holder = getattr(holder, category)
            option = declared.get(name)
            # JSON has neither enums nor tuples. An unknown name is refused by `setattr`, with a
            # suggestion.
            value = restored(option, value) if isinstance(option, Option) else value
            setattr(holder, key, value)
        return self

    @_OnClassOrObject
    def from_dict(self, dct: dict[str, Any]) -> IPUConfig:
        """Set the options that a dict made by `to_dict` holds; returns the configuration.

        Args:
            dct: values by full name, or nested by category.
        """
        return self._set(dct)

    @_OnClassOrObject
    def from_json(self, json_cfg: str) -> IPUConfig:
        """Set the options that a text made by `to_json` holds; returns the configuration.

        Args:
            json_cfg: the text.
        """
        return self._set(json.loads(json_cfg))


def _flattened(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        # Options for the chip's compiler are dicts themselves, and no category.
        if isinstance(value, dict) and not key.endswith("poplar_options"):
            flat |= _flattened(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


# -- the system that is configured --------------------------------------------------------------


@dataclasses.dataclass
class _System:
    """What is configured: the configuration, and the devices of each logical device."""

    config: IPUConfig
    groups: list[list[Any]]
    found: list[Any] | None


# One for the process, as in the original.
_system: _System | None = None


def configure_ipu_system(
    config: IPUConfig, device: str = "cpu", reset_configuration: bool = True
) -> None:
    """Use the devices that `config` describes from now on.

    The number of replicas follows from them: the devices divided by those that one copy of the program
    needs.

    Args:
        config: the configuration.
        device: where the original ran the operation that did this; without effect.
        reset_configuration: whether a system with another configuration may be configured again.

    Raises:
        IPUValueError: `config` is not an IPUConfig, or breaks one of its rules.
        FailedPreconditionError: another configuration is in use, and `reset_configuration`
            is False.
        DeviceError: there are fewer devices than it asks for.

    >>> from tailrace.compat import ipu
    >>> cfg = ipu.config.IPUConfig()
    >>> cfg.auto_select_ipus = [1, 2]  # two logical devices
    >>> ipu.config.configure_ipu_system(cfg)
    >>> ipu.utils.get_num_of_ipus_in_device("/device:IPU:1")
    2
    >>> ipu.config.reset_ipu_configuration()
    """
    global _system
    del device
    if not isinstance(config, IPUConfig):
        raise IPUValueError(f"`config` must be an IPUConfig. Received: {type(config).__name__}.")
    _check_rules(config)
    if _system is not None:
        if _system.config.to_dict() != config.to_dict():
            if not reset_configuration:
                raise FailedPreconditionError(
                    "IPU system was previously configured with another configuration. Call "
                    "reset_ipu_configuration(), or leave reset_configuration=False out."
                )
            logger.info("The devices are configured again, with another configuration.")
        reset_ipu_configuration()
    # After the reset, which gives back what a configuration before this one took.
    found = devices.available()
    groups = _groups(config, found)
    # A copy: changing `config` afterwards configures nothing.
    _system = _System(IPUConfig.from_dict(config.to_dict()), groups, devices.chosen())
    # Trainers and Keras models use the first logical device; a program of another ordinal switches
    # for its own call (`CompiledOp.__call__`).
    devices.use(groups[0])
    for name, option, value in config.options():
        # Noted rather than refused: programs set such options to make room on the chip, and compute the
        # same without them.
        if option.only_there and value != option.default:
            note_once(
                f"IPUConfig.{name} = {value!r} is about the original chip and changes nothing here."
            )


def reset_ipu_configuration() -> None:
    """Forget the configuration; the process has all its devices again.

    >>> from tailrace.compat import ipu
    >>> ipu.config.IPUConfig().configure_ipu_system()
    >>> ipu.config.reset_ipu_configuration()
    >>> ipu.config.get_ipu_config()
    Traceback (most recent call last):
    ...
    tailrace.compat.ipu.errors.IPURuntimeError: No IPU devices configured.
    """
    global _system
    if _system is not None:
        # None, if nothing was chosen before: all devices of the process.
        devices.use(_system.found)
    _system = None


def get_ipu_config(session: object = None) -> list[IPUConfig]:
    """The configuration that is in force, in a list as in the original.

    Args:
        session: without effect.

    Raises:
        IPURuntimeError: nothing is configured.

    >>> from tailrace.compat import ipu
    >>> cfg = ipu.config.IPUConfig()
    >>> cfg.allow_recompute = True
    >>> cfg.configure_ipu_system()
    >>> ipu.config.get_ipu_config()[0].allow_recompute
    True
    >>> ipu.config.reset_ipu_configuration()
    """
    del session
    if _system is None:
        raise IPURuntimeError("No IPU devices configured.")
    return [_system.config]


def running_on_ipu_model() -> bool:
    """Whether programs run on a simulator of the chip: always False here.

    >>> from tailrace.compat import ipu
    >>> ipu.config.running_on_ipu_model()
    False
    """
    return False


def current() -> IPUConfig:
    """The configuration in force, or the default one."""
    # Programs may run before anything is configured: the original's defaults hold.
    return IPUConfig() if _system is None else _system.config


def group(ordinal: int = 0) -> list[Any]:
    """The devices of a logical device; without a configuration, one of those there are."""
    groups = [devices.available()[:1]] if _system is None else _system.groups
    if not 0 <= ordinal < len(groups):
        raise DeviceError(
            f"Device ordinal {ordinal} was asked for, and {len(groups)} logical devices are "
            f"configured. Give auto_select_ipus a list with one entry for each of them."
        )
    return groups[ordinal]


def shards_of(highest: int) -> int:
    """How many devices one copy takes whose highest device number is `highest`.

    >>> [shards_of(highest) for highest in (0, 1, 2, 3, 4)]
    [1, 2, 4, 4, 8]
    """
    # The original's devices come in powers of two.
    return 1 << highest.bit_length() if highest else 1


def replicas(shards: int = 1, ordinal: int = 0) -> int:
    """How many copies of a program run: the devices divided by those that one copy takes."""
    count = len(group(ordinal))
    if count % shards:
        raise InternalError(
            f"Trying to compile a graph for an IPU device with {count} IPUs and {shards} shards. "
            f"The number of shards needs to divide the number of IPUs."
        )
    return count // shards


def _check_rules(config: IPUConfig) -> None:
    if _entries(config.auto_select_ipus) and _entries(config.select_ipus, True):
        raise ConfigurationError("Only one of auto_select_ipus and select_ipus can be set.")
    if config.io_tiles.place_ops_on_io_tiles and not config.io_tiles.num_io_tiles:
        raise IPUValueError(
            "Cannot place ops on I/O tiles when no I/O tiles are configured: set "
            "io_tiles.num_io_tiles, or leave io_tiles.place_ops_on_io_tiles out."
        )
    size = config.norms.experimental.distributed_batch_norm_replica_group_size
    if size < 1:
        raise IPUValueError(
            f"norms.experimental.distributed_batch_norm_replica_group_size must be at least 1. "
            f"Received: {size}."
        )
    processes = config.experimental.multi_replica_distribution
    if processes.process_count and not 0 <= processes.process_index < processes.process_count:
        raise IPUValueError(
            f"The process index must be in [0, {processes.process_count}). "
            f"Received: {processes.process_index}."
        )
    kind = config.device_connection.type
    # These compile for a chip that is not attached: nothing here could run the result.
    if kind in (DeviceConnectionType.PRE_COMPILE, DeviceConnectionType.NEVER):
        raise IPUValueError(
            f"device_connection.type = {kind} compiles programs without a device. Here the compiled "
            f"program belongs to the devices there are: use ALWAYS or ON_DEMAND."
        )


def _entries(value: int | Sequence[int], zero_counts: bool = False) -> list[int]:
    entries: list[Any] = list(value) if isinstance(value, list | tuple) else [value]
    for entry in entries:
        if (
            not isinstance(entry, int)
            or isinstance(entry, bool)
            # 0 is the number of a device, and no count of them.
            or entry < (0 if zero_counts else 1)
        ):
            raise IPUValueError(
                f"Devices are counted and numbered by integers. Received: {value!r}."
            )
    return entries


def _groups(config: IPUConfig, found: list[Any]) -> list[list[Any]]:
    chosen = _entries(config.select_ipus, True)
    if chosen:
        if len(set(chosen)) != len(chosen):
            raise IPUValueError(f"select_ipus names a device twice: {config.select_ipus!r}.")
        if max(chosen) >= len(found):
            raise DeviceError(
                f"select_ipus = {config.select_ipus!r} names a device that is not there: there are "
                f"{len(found)}, numbered from 0."
            )
        # Each id is a logical device of its own, as in the original.
        return [[found[number]] for number in chosen]
    # Several entries are several logical devices, each with as many devices, in this order.
    counts = _entries(config.auto_select_ipus) or [1]
    if sum(counts) > len(found):
        virtual = (
            f"Ask for fewer; for virtual CPU devices, start the process with JAX_PLATFORMS=cpu and "
            f"TAILRACE_DEVICES={sum(counts)}."
        )
        # Enough virtual devices were requested, but only after JAX had started.
        late = found[0].platform == "cpu" and (asked_devices() or 0) >= sum(counts)
        raise DeviceError(
            f"auto_select_ipus = {config.auto_select_ipus!r} asks for {sum(counts)} devices, and "
            f"there are {len(found)}. {TOO_LATE if late else virtual}"
        )
    groups, first = [], 0
    for count in counts:
        taken = found[first : first + count]
        groups.append([taken[i] for i in config.selection_order.order(count)])
        first += count
    return groups


__getattr__, __dir__ = missing_from(__name__)
