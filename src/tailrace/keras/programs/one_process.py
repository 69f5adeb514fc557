"""Where the programs of a Keras model run: on devices of one process."""

from __future__ import annotations

from tailrace.devices.processes import distributed
from tailrace.errors import DistributedError
from tailrace.keras.settings.options import Settings
from tailrace.program.running.placement import Placement


def placement_of(settings: Settings) -> Placement:
    """Where a program of a model runs.

    Raises:
        DistributedError: there are several processes. Keras' loop, data and callbacks belong to one.
            The rule of a placement would advise more replicas, which are refused next.
    """
    count = distributed.process_count()
    if count > 1:
        raise DistributedError(
            f"A Keras model trains in one process, on all of its devices; this program has {count} "
            f"processes. Start one, or train with tr.Trainer."
        )
    return Placement(settings.replicas)
