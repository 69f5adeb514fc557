"""The identity of a process: from arguments, `tailrace launch`, or a cluster."""

from __future__ import annotations

import os

from tailrace.devices.environment import COORDINATOR, PROCESS, PROCESSES
from tailrace.errors import DistributedError


def from_environment() -> tuple[str, int, int] | None:
    """Coordinator, number of processes and index of this one, as `tailrace launch` sets them."""
    address = os.environ.get(COORDINATOR)
    if not address:
        return None
    count, number = os.environ.get(PROCESSES, ""), os.environ.get(PROCESS, "")
    if not (count.isdigit() and number.isdigit()):
        raise DistributedError(
            f"{COORDINATOR} is set, so {PROCESSES} and {PROCESS} must be numbers. Received: "
            f"{PROCESSES}={count!r}, {PROCESS}={number!r}."
        )
    return address, int(count), int(number)


def in_a_cluster() -> bool:
    """Whether JAX detects the processes itself: Slurm, Open MPI, Kubernetes, a TPU pod."""
    environment = os.environ
    several = [environment.get(name, "") for name in ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE")]
    # They are set for a single task too: an interactive Slurm job is one process.
    if any(text.isdigit() and int(text) > 1 for text in several):
        return True
    if "KUBERNETES_SERVICE_HOST" in environment and "JOB_COMPLETION_INDEX" in environment:
        return True
    return (
        "JAX_COORDINATOR_ADDRESS" in environment or "MEGASCALE_COORDINATOR_ADDRESS" in environment
    )


def check_complete(address: str | None, count: int | None, number: int | None) -> None:
    """Check that all three are given."""
    if address is None or count is None or number is None:
        raise DistributedError(
            f"A process needs to know the coordinator, how many processes there are, and which one "
            f"it is. Received: coordinator_address={address!r}, num_processes={count!r}, "
            f"process_id={number!r}. Give all three, or none under tailrace launch, Slurm, Kubernetes "
            f"or Open MPI."
        )


def check_address(address: str | None, count: int | None, number: int | None) -> None:
    """Check the arguments, before anything waits for them."""
    if count is None or number is None:
        return
    # Before the roll call: a process with a wrong number would make the others wait for the timeout.
    whole = all(isinstance(n, int) and not isinstance(n, bool) for n in (count, number))
    if not whole or count < 1 or not 0 <= number < count:
        raise DistributedError(
            f"Processes are numbered from 0 to num_processes - 1. Received: process_id={number!r}, "
            f"num_processes={count!r}."
        )
    host, colon, port = address.rpartition(":") if isinstance(address, str) else ("", "", "")
    if not (host and colon and port.isascii() and port.isdigit() and int(port) < 1 << 16):
        raise DistributedError(
            f"The coordinator is given as host:port, for example 10.0.0.1:12321. Received: "
            f"coordinator_address={address!r}."
        )
