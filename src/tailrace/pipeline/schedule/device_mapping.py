"""Parsing of `stages` and `device_mapping` into one form.

A stage is on one device, or is a group of concurrent members on one device each. The form that the
rest of the plan works with is the *placement*: for each stage a tuple with the device of each member.
"""

import operator
from collections.abc import Sequence
from typing import Any, TypeGuard, cast

import numpy as np

from tailrace.base.messages import counted
from tailrace.errors import PlanError

Placement = tuple[tuple[int, ...], ...]
DeviceMapping = tuple[int | tuple[int, ...], ...]
Names = tuple[str | tuple[str, ...], ...]


def is_group(value: object) -> TypeGuard[Sequence[Any]]:
    """Whether the value is a list or a tuple."""
    return isinstance(value, list | tuple)


def _plain(members: Sequence[Any]) -> Any:
    """A group as a tuple; a group of one is the member itself."""
    return tuple(members) if len(members) != 1 else members[0]


MOST_STAGES, MOST_MICROBATCHES = 10_000, 10**12
"""More than any model has; larger numbers are mistakes, or come from a damaged file."""


def read_microbatches(value: object) -> int:
    """The number of microbatches, or a PlanError."""
    count = whole_number(value, "microbatches")
    if count > MOST_MICROBATCHES:
        raise PlanError(
            f"A plan has at most {MOST_MICROBATCHES:,} microbatches. Received: microbatches={count:,}."
        )
    return count


def read_flag(value: object, name: str) -> bool:
    """`value` as a bool, or a PlanError that names the argument."""
    # 0 and 1 count too; text does not: "False" would be true.
    if not isinstance(value, int | np.bool_):
        raise PlanError(f"`{name}` is True or False; received {value!r}.")
    return bool(cast(Any, value))


def whole_number(value: Any, name: str) -> int:
    """`value` as an int, or a PlanError that names the argument."""
    # True is an int in Python, and `stages=True` is a mistake.
    if not isinstance(value, bool):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise PlanError(f"`{name}` must be a whole number; received {value!r}.")


def read_stages(stages: object) -> tuple[list[int | None], Names]:
    """The number of members of each stage (None: the mapping decides), and names if given.

    A list may hold group sizes (`[1, 2, 1]`) or the stages themselves (names, functions), where
    a list within the list is a group of concurrent stages.
    """
    # With a number of stages, the mapping decides their sizes: [0, (1, 2)] makes a group of two.
    if not is_group(stages):
        sizes: list[int | None] = [None] * _within(max(whole_number(stages, "stages"), 0), stages)
        entries: Sequence[Any] = ()
    else:
        entries = stages
        found = [_group_size(entry, index) for index, entry in enumerate(entries)]
        _within(sum(found), stages)
        sizes = [*found]
    if len(sizes) < 2:
        raise PlanError(
            "Pipeline requires at least two computational stages. "
            f"Received {len(sizes)} (stages={stages!r}). Cut the model in two or more, or train "
            "it without a pipeline; several stages may share a device (device_mapping=[0, 0])."
        )
    return sizes, _names(entries)


def _within(members: int, stages: object) -> int:
    """Refuse more stages than can be planned: the memory of a plan grows with them."""
    if members > MOST_STAGES:
        raise PlanError(
            f"A plan has at most {MOST_STAGES:,} stages, members of groups counted. Received: "
            f"{members:,} (stages={repr(stages)[:60]})."
        )
    return members


def _group_size(entry: object, index: int) -> int:
    if is_group(entry):
        if any(is_group(member) for member in entry):
            raise PlanError(
                "A group of concurrent stages cannot hold another group: nested lists are not "
                f"supported. Stage {index} is {entry!r}. Write its members in one flat list."
            )
        size = len(entry)
    # A number is a size; anything else that is not a list (a name, a function) is one stage.
    elif isinstance(entry, int) and not isinstance(entry, bool):
        size = entry
    else:
        size = 1
    if size < 1:
        raise PlanError(
            f"Each stage has at least one member. Stage {index} is {entry!r}. "
            "Write 1 for a plain stage, or the number of its concurrent members."
        )
    return size


def _names(entries: Sequence[Any]) -> Names:
    """The names, if every stage has one; functions and sizes do not name a stage."""
    names: list[str | tuple[str, ...]] = []
    for entry in entries:
        if is_group(entry) and all(isinstance(each, str) for each in entry):
            names.append(_plain(entry))
        elif isinstance(entry, str):
            names.append(entry)
        else:
            return ()
    return tuple(names)


def read_names(names: Sequence[str | Sequence[str]], stages: int) -> Names:
    """Names for every stage, or none at all."""
    if names and len(names) != stages:
        raise PlanError(
            f"Stages are named all or none: {len(names)} names for {stages} stages. "
            f"Received {list(names)!r}."
        )
    return tuple(name if isinstance(name, str) else tuple(name) for name in names)


def read_mapping(mapping: object, sizes: Sequence[int | None]) -> DeviceMapping:
    """The device (or devices) of each stage; without a mapping, devices are numbered in order."""
    if mapping is None:
        return _default_mapping(sizes)
    if not is_group(mapping) and not isinstance(mapping, range):
        raise PlanError(
            "device_mapping argument needs to be a list or a tuple with a device for each stage; "
            f"received {mapping!r}."
        )
    if len(mapping) != len(sizes):
        raise PlanError(
            f"Each stage must be mapped to a device: {len(mapping)} mappings != {len(sizes)} "
            f"stages. Received device_mapping={list(mapping)!r}; give one device for each stage, "
            "or a list of devices for a group of concurrent stages."
        )
    return tuple(
        _read_entry(entry, size, index)
        for index, (entry, size) in enumerate(zip(mapping, sizes, strict=True))
    )


def _default_mapping(sizes: Sequence[int | None]) -> DeviceMapping:
    mapping: list[int | tuple[int, ...]] = []
    free = 0
    for size in sizes:
        members = tuple(range(free, free + (size or 1)))
        mapping.append(_plain(members))
        free += len(members)
    return tuple(mapping)


def _read_entry(entry: object, size: int | None, stage: int) -> int | tuple[int, ...]:
    given: Sequence[Any] = entry if is_group(entry) else [entry]
    if any(is_group(each) for each in given):
        raise PlanError(
            "device_mapping cannot be nested more than once: nested lists are not supported. "
            f"Stage {stage} is mapped to {entry!r}. Write one flat list of devices for its group."
        )
    devices = tuple(_read_device(each, stage) for each in given)
    if not devices or (size is not None and len(devices) != size):
        members = f"{size or 1} concurrent stages" if (size or 1) > 1 else "a single stage"
        raise PlanError(
            f"A group of concurrent stages needs a list with one device for each member. Stage "
            f"{stage} is {members}, and device_mapping[{stage}] is {entry!r}. "
            f"Give it {counted(size or 1, 'device')}."
        )
    return _plain(devices)


def _read_device(value: object, stage: int) -> int:
    device = whole_number(value, f"device_mapping[{stage}]")
    # The original spreads a stage over all devices with -1; here that is a group.
    if device < 0:
        raise PlanError(
            f"Devices are numbered from 0. Stage {stage} is mapped to {device}. To spread a stage "
            "over devices, make it a group of concurrent stages with a list of devices."
        )
    return device


def placement_of(mapping: DeviceMapping) -> Placement:
    """For each stage, the device of each of its members."""
    return tuple(entry if isinstance(entry, tuple) else (entry,) for entry in mapping)


def require_devices(named: Sequence[int], replicas: int, there: int) -> None:
    """Refuse a mapping with devices that a replica does not have."""
    # Replicas have disjoint devices: each numbers its own from 0.
    each = there // replicas
    beyond = [device for device in named if device >= each]
    if beyond:
        shared = f" ({there} for {replicas} replicas)" if replicas > 1 else ""
        raise PlanError(
            f"device_mapping numbers the devices of a replica from 0, and a replica has {each} here"
            f"{shared}. Received: device {', '.join(map(str, beyond))}. Use numbers below {each}; "
            f"several stages may share a device. Or use tr.configure(devices="
            f"{(max(beyond) + 1) * replicas}) before JAX starts."
        )


def require_one_stage_a_device(placement: Placement) -> None:
    """Refuse a mapping that an Interleaved training schedule cannot run."""
    owner: dict[int, int] = {}
    for stage, devices in enumerate(placement):
        # Members of one group may share a device: they are one unit there.
        for device in set(devices):
            if device in owner:
                raise PlanError(
                    "The interleaved schedule does not support multiple pipeline stages on the "
                    "same device for training graphs, because a device does one thing per tick: "
                    f"stages {owner[device]} and {stage} are both on device {device}. Give each "
                    "stage its own device, or use the grouped or the sequential schedule."
                )
            owner[device] = stage
