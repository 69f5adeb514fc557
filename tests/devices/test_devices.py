"""Choosing devices: each case in a process of its own, because JAX starts once."""

import os
import subprocess
import sys
import types

import jax
import pytest

import tailrace as tr
from tailrace.devices import devices
from tailrace.errors import DeviceError, ReplicaError


def python(code, **environment):
    """Run `code` in a fresh interpreter; returns (exit code, standard output, last error line)."""
    clean = {k: v for k, v in os.environ.items() if k not in ("TAILRACE_DEVICES", "XLA_FLAGS")}
    clean.pop("JAX_NUM_CPU_DEVICES", None)
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**clean, "JAX_PLATFORMS": "cpu", **environment},
        capture_output=True,
        text=True,
        timeout=600,
    )
    errors = [line for line in done.stderr.splitlines() if line.strip()]
    return done.returncode, done.stdout.split(), errors[-1] if errors else ""


@pytest.mark.parametrize(
    ("code", "environment", "expected"),
    [
        ("print(len(tr.configure(devices=3)), len(jax.devices()))", {}, ["3", "3"]),
        ("print(len(tr.configure(devices=2, platform='cpu')))", {}, ["2"]),
        ("print(len(tr.configure()), len(tr.configure(platform='cpu')))", {}, ["1", "1"]),
        (
            "tr.configure(4); print(len(tr.configure(2)), len(tr.configure()), len(jax.devices()))",
            {},
            ["2", "4", "4"],
        ),
        (
            "print(len(jax.devices()), len(devices.available()))",
            {"TAILRACE_DEVICES": "5"},
            ["5"] * 2,
        ),
        (
            "print(len(tr.configure(2)), devices.resolve_replicas(None))",
            {"TAILRACE_DEVICES": "5"},
            ["2", "2"],
        ),
        # After JAX has started with enough devices, a subset can still be chosen.
        ("jax.devices(); print(len(tr.configure(devices=1)))", {}, ["1"]),
    ],
)
def test_devices_that_can_be_had(code, environment, expected):
    start = "import jax, tailrace as tr\nfrom tailrace.devices import devices\n"
    returned, printed, error = python(start + code, **environment)
    assert (returned, printed) == (0, expected), error


@pytest.mark.parametrize(
    ("code", "environment", "text"),
    [
        (
            "import jax, tailrace as tr; jax.devices(); tr.configure(devices=4)",
            {},
            "4 were asked for, but JAX has already started with 1. Call tr.configure(devices=4) "
            "before anything uses JAX, or set TAILRACE_DEVICES=4 in the environment.",
        ),
        (
            "import tailrace as tr; tr.configure(2, platform='tpu')",
            {},
            "There are no tpu devices here",
        ),
        (
            "import tailrace",
            {"TAILRACE_DEVICES": "many"},
            "TAILRACE_DEVICES must be a positive number of devices. "
            "Received: TAILRACE_DEVICES='many'.",
        ),
        ("import tailrace", {"TAILRACE_DEVICES": "0"}, "Received: TAILRACE_DEVICES='0'"),
    ],
)
def test_devices_that_cannot_be_had(code, environment, text):
    returned, _, error = python(code, **environment)
    assert returned == 1
    assert "DeviceError" in error
    assert text in error


def test_importing_does_not_start_jax():
    code = (
        "import tailrace, jax\n"
        "jax.config.update('jax_num_cpu_devices', 3)\n"
        "print(len(jax.devices()))"
    )
    assert python(code)[:2] == (0, ["3"])


@pytest.mark.parametrize("count", [0, -1, True, 1.5])
def test_bad_counts(count):
    with pytest.raises(DeviceError, match=rf"at least one device. Received: devices={count}"):
        tr.configure(devices=count)


@pytest.mark.parametrize("count", ["2", [1]])
def test_counts_that_are_no_numbers(count):
    with pytest.raises(DeviceError, match="at least one device. Received: devices="):
        tr.configure(devices=count)


def test_a_bad_platform():
    with pytest.raises(DeviceError, match=r"is 'cpu', 'gpu' or 'tpu'. Received: platform='ipu'"):
        tr.configure(platform="ipu")


@pytest.mark.cpu
@pytest.mark.usefixtures("same_devices")
def test_a_subset_is_what_programs_use():
    assert tr.configure(devices=2) == jax.devices()[:2]
    assert devices.resolve_replicas(None) == 2
    with pytest.raises(ReplicaError, match=r"take 3 x 1 = 3 devices, and there are 2"):
        tr.compile(lambda x: x, replicas=3)
    assert len(tr.configure(devices=8)) == 8


@pytest.mark.cpu
@pytest.mark.usefixtures("same_devices")
def test_a_failed_choice_changes_nothing():
    tr.configure(devices=4)
    with pytest.raises(DeviceError):
        tr.configure(devices=99)
    assert len(devices.available()) == 4


@pytest.mark.cpu
def test_replicas_are_the_devices_divided_by_what_a_copy_needs():
    assert devices.resolve_replicas(None, per_copy=2) == 4
    with pytest.raises(ReplicaError, match=r"8 / 3 leaves a remainder of 2.*devices=6"):
        devices.resolve_replicas(None, per_copy=3)


def test_stages_of_a_replica_are_neighbours():
    mesh = devices.mesh(replicas=4, stages=2)
    assert mesh.axis_names == (devices.REPLICA, devices.STAGE)
    assert [d.id for d in mesh.devices[1]] == [2, 3]
    with pytest.raises(ReplicaError, match=r"needs 3 devices take 3 x 3 = 9 .*Use replicas=2 at"):
        devices.mesh(replicas=3, stages=3)


@pytest.mark.parametrize(
    ("before", "options", "expected"),
    [
        ("", "platform='cpu'", "cpus[0]"),  # JAX prefers the GPU: the platform becomes its default
        ("", "devices=2", "None"),  # no platform was asked for
        ("jax.config.update('jax_default_device', jax.devices()[1])", "platform='cpu'", "cpus[1]"),
        ("jax.config.update('jax_platforms', 'cpu')", "platform='cpu'", "None"),
    ],
)
def test_a_platform_becomes_the_default_of_jax(before, options, expected):
    # A machine whose JAX prefers a GPU, played by one without.
    code = f"""
import jax, jax.numpy as jnp, tailrace as tr
jax.config.update("jax_num_cpu_devices", 2)
cpus = jax.devices("cpu")
jax.default_backend = lambda: "gpu"
{before}
tr.configure({options})
print(jax.config.jax_default_device == {expected}
      and jnp.ones(3).devices() == {{jax.config.jax_default_device or cpus[0]}})
"""
    assert python(code, JAX_PLATFORMS="")[:2] == (0, ["True"])


def test_the_platform_is_that_of_the_devices_chosen(same_devices):
    assert devices.platform() == jax.devices()[0].platform
    devices.use([types.SimpleNamespace(platform="tpu")])
    assert devices.platform() == "tpu"


@pytest.mark.cpu
def test_a_platform_that_jax_prefers_leaves_its_default_alone():
    assert jax.default_backend() == "cpu"
    assert (
        jax.config.jax_default_device is None
    )  # after tr.configure(platform="cpu") in conftest.py


@pytest.mark.parametrize(
    ("told", "left"),
    [
        (None, None),
        ({"bytes_limit": 5}, None),
        ({"bytes_limit": 5, "peak_bytes_in_use": 3}, 2),
        (RuntimeError("not implemented"), None),
    ],
)
def test_memory_that_was_never_needed(told, left):
    """Not all devices tell."""

    class Some:
        def memory_stats(self):
            if isinstance(told, Exception):
                raise told
            return told

    assert devices.memory_left(Some()) == left
