"""The devices that this process trains on, and the mesh of replicas (and stages) on them."""

from __future__ import annotations

import operator
import os
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from tailrace.base.messages import counted, there_are
from tailrace.devices.environment import TOO_LATE, asked_devices
from tailrace.errors import DeviceError, ReplicaError

REPLICA, STAGE = "replica", "stage"
"""The names of the mesh's axes."""

Device = Any
"""A `jax.Device`; to a type checker that name is a variable, not a class."""

_chosen: list[Device] | None = None
_default: Device = None  # the default device that we gave JAX


def configure(devices: int | None = None, platform: str | None = None) -> list[Device]:
    """Choose the devices of this process; call it before anything else uses JAX.

    Virtual CPU devices are created only if there is no accelerator, or with `platform="cpu"`. Without
    this call, and without the environment variable `TAILRACE_DEVICES`, all devices that JAX finds may
    be used.

    A `platform` becomes JAX's default too, so that plain JAX code in the same process uses the same
    kind of device: with `platform="cpu"` on a machine with a GPU, `jnp.ones(3)` is on the CPU. An
    explicit choice for JAX (`JAX_PLATFORMS`, `jax_default_device`) is kept.

    Args:
        devices: the number of devices; with several processes, in each of them. None for all.
        platform: "cpu", "gpu" or "tpu". None for JAX's preference.

    Returns:
        The chosen devices.

    Raises:
        DeviceError: there are not that many devices, or JAX has started already.

    >>> import tailrace as tr
    >>> len(tr.configure(devices=1))
    1
    """
    global _chosen
    if devices is not None and not _is_count(devices):
        raise DeviceError(
            f"A process needs at least one device. Received: devices={devices!r}. "
            f"Give a positive integer, or leave it out for all devices."
        )
    known = isinstance(platform, str) and platform in ("cpu", "gpu", "cuda", "rocm", "tpu")
    if platform is not None and not known:
        raise DeviceError(f"A platform is 'cpu', 'gpu' or 'tpu'. Received: platform={platform!r}.")
    # Before JAX is asked for devices, which starts it.
    started = not _ask_for_cpu_devices(devices)
    found = _devices_of(platform)
    each = _by_process(found)
    if devices is not None and min(map(len, each)) < devices:
        raise DeviceError(_too_few(devices, min(each, key=len), started))
    # The same number from each process: every one has to take part in every program.
    _chosen = [device for own in each for device in own[:devices]]
    if platform is not None:
        _make_default()
    return list(_chosen)


def _make_default() -> None:
    """Make the first chosen device JAX's default, unless JAX is configured otherwise."""
    global _default
    own = [device for device in _chosen or () if device.process_index == jax.process_index()]
    config: Any = jax.config
    asked = config.jax_default_device
    configured = config.jax_platforms or (asked is not None and asked is not _default)
    if configured or not own:
        return
    # If JAX prefers that platform anyway, nothing is set: a default device is part of the key of JAX's
    # compilation cache.
    preferred = jax.default_backend() if asked is None else None
    _default = None if own[0].platform == preferred else own[0]
    config.update("jax_default_device", _default)


def offer_cpu_devices(count: int) -> None:
    """Request virtual CPU devices, unless JAX has started or a number was requested already.

    With an accelerator this has no effect: its devices come first.
    """
    asked = os.environ.get("TAILRACE_DEVICES") or "host_platform_device_count" in os.environ.get(
        "XLA_FLAGS", ""
    )
    if not asked and getattr(jax.config, "jax_num_cpu_devices", -1) in (-1, None):
        _ask_for_cpu_devices(count)


def use(devices: list[Device] | None) -> None:
    """Use these devices, in this order, from now on; None for all (for front ends)."""
    global _chosen
    _chosen = None if devices is None else list(devices)


def chosen() -> list[Device] | None:
    """The chosen devices, or None if none were chosen."""
    return None if _chosen is None else list(_chosen)


def available() -> list[Device]:
    """The chosen devices, or all."""
    if _chosen is not None:
        return list(_chosen)
    # On first use, not at import: `tr.configure` may still come.
    wanted = asked_devices()
    return configure(wanted) if wanted else list(jax.devices())


def memory_stats(device: Device) -> dict[str, int]:
    """What a device tells about its memory; empty if nothing. Some plugins raise an error then."""
    try:
        return dict(device.memory_stats() or {})
    except Exception:
        return {}


def memory_left(device: Device) -> int | None:
    """The bytes that a device never needed so far; None if it does not tell."""
    stats = memory_stats(device)
    limit, most = stats.get("bytes_limit"), stats.get("peak_bytes_in_use")
    return None if limit is None or most is None else limit - most


def platform() -> str:
    """The platform that programs are compiled for: that of the chosen devices, not JAX's default."""
    return available()[0].platform


def mesh(replicas: int, stages: int = 1) -> Mesh:
    """The devices as a grid of replicas and stages; stages of one replica are neighbours."""
    found = available()
    # Stages of one replica are neighbours in the list: they exchange values in every tick, replicas
    # only once per step.
    needed = replicas * stages
    if needed > len(found):
        if stages > len(found):
            raise ReplicaError(
                f"A pipeline whose stages are on {stages} devices needs as many, and "
                f"{there_are(len(found))}. Put several stages on one device with "
                f"tr.Pipeline(device_mapping=[...]), or use tr.configure(devices={needed}) before "
                f"JAX starts."
            )
        raise ReplicaError(
            f"{replicas} replicas of a model that needs {counted(stages, 'device')} take "
            f"{replicas} x {stages} = {needed} devices, and {there_are(len(found))}. Use replicas="
            f"{len(found) // stages} at most, or tr.configure(devices={needed}) before JAX starts."
        )
    return Mesh(np.array(_evenly(found, needed)).reshape(replicas, stages), (REPLICA, STAGE))


def local_replicas(mesh: Mesh) -> int:
    """The number of a mesh's replicas that this process runs, or runs a stage of."""
    here = jax.process_index()
    # A replica counts if any of its stages is here: its elements are needed on all of them.
    rows = mesh.devices.reshape(mesh.shape[REPLICA], -1)
    return sum(any(device.process_index == here for device in row) for row in rows)


def _evenly(found: list[Device], needed: int) -> list[Device]:
    """The first `needed` devices; with several processes, the same number from each."""
    each = _by_process(found)
    if len(each) == 1:
        return found[:needed]
    # A program is dispatched by every process on its own devices: one without any could not take part.
    count, rest = divmod(needed, len(each))
    if rest or min(map(len, each)) < count:
        raise ReplicaError(
            f"Devices are taken equally from all processes: {needed} devices from {len(each)} "
            f"processes with {min(map(len, each))} each cannot be. Use a number of replicas that "
            f"makes it a multiple of {len(each)}, or None for all devices."
        )
    return [device for own in each for device in own[:count]]


def _by_process(found: list[Device]) -> list[list[Device]]:
    """Devices grouped by process, in the order of processes."""
    numbers = sorted({device.process_index for device in found})
    return [[device for device in found if device.process_index == n] for n in numbers]


def resolve_replicas(replicas: int | None, per_copy: int = 1) -> int:
    """The number of replicas: as given, or the devices divided by the devices per copy."""
    if replicas is None:
        count = len(available())
        if count % per_copy:
            raise ReplicaError(
                f"The number of replicas is the devices divided by what one copy needs: {count} / "
                f"{per_copy} leaves a remainder of {count % per_copy}. Choose devices with "
                f"tr.configure(devices={count - count % per_copy}), or give replicas= yourself."
            )
        return count // per_copy
    if isinstance(replicas, bool) or not isinstance(replicas, int) or replicas < 1:
        raise ReplicaError(
            f"replicas counts the copies of the model: a whole number of at least 1. "
            f"Received: replicas={replicas!r}. Use None for as many as the devices allow."
        )
    return replicas


def _is_count(value: Any) -> bool:
    try:
        return not isinstance(value, bool) and operator.index(value) >= 1
    except TypeError:
        return False


def _ask_for_cpu_devices(devices: int | None) -> bool:
    """Request virtual CPU devices from JAX; False if it has started already."""
    if devices is None:
        return True
    try:
        jax.config.update("jax_num_cpu_devices", int(devices))
    # JAX refuses a change after its devices were made.
    except RuntimeError:
        return False
    return True


def _devices_of(platform: str | None) -> list[Device]:
    try:
        return list(jax.devices(platform) if platform else jax.devices())
    except RuntimeError as error:
        raise DeviceError(
            f"There are no {platform} devices here ({error}). Leave platform out, or use 'cpu'."
        ) from error


def _too_few(devices: int, found: list[Device], started: bool) -> str:
    kind = found[0].platform if found else "cpu"
    if kind != "cpu":
        return (
            f"{devices} devices were asked for, and {there_are(len(found))} of the platform {kind!r}. "
            f"Ask for at most {len(found)}, or use tr.configure(devices={devices}, platform='cpu') "
            f"for virtual CPU devices."
        )
    reason = "JAX has already started" if started else "JAX made"
    text = (
        f"Virtual CPU devices are made when JAX starts: {devices} were asked for, but {reason} with "
        f"{len(found)}."
    )
    if (asked_devices() or 0) >= devices:
        return f"{text} {TOO_LATE}"
    return (
        f"{text} Call tr.configure(devices={devices}) before anything uses JAX, or set "
        f"TAILRACE_DEVICES={devices} in the environment."
    )
