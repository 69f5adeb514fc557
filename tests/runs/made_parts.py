"""Executions made by hand: what a writer gets, without a device and a training loop."""

import numpy as np

from tailrace.records.parts import Part
from tailrace.records.sinks import Finished
from tailrace.taps.catalogue import Entry
from tailrace.taps.tap import Chosen, Tap, every


def chosen(name, *, mode="all", reduce="tensor", microbatches=1, differs=False, shape=()):
    entry = Entry(name, name.split("/")[0], shape, np.dtype("float32"))
    loops = 2 if microbatches > 1 else 1
    return Chosen(Tap(name, mode=mode, reduce=reduce), entry, loops, differs, microbatches)


def execution(first_step, steps, ones, replicas=1):
    """Values that tell where they belong: the step, and a thousandth for each element."""
    parts = []
    for one in ones:
        lead = (steps, one.microbatches) if one.loops > 1 else (steps,)
        size = int(np.prod(one.entry.shape))
        base = np.arange(first_step, first_step + steps, dtype=np.float32)
        base = base.reshape(steps, *[1] * (len(lead) - 1 + len(one.entry.shape)))
        inner = np.arange(size, dtype=np.float32).reshape(one.entry.shape) / 1000
        value = np.broadcast_to(base + inner, (*lead, *one.entry.shape)).copy()
        if one.tap.mode in ("sum", "final"):
            value = value[-1] if one.loops == 1 else value[-1, -1]
        if replicas > 1:
            value = np.stack([value] * replicas)
        parts.append(Part(one, value, None, -1, first_step, steps, replicas, 1))
    loss = np.arange(first_step, first_step + steps, dtype=np.float32)[:, None, None]
    return Finished(first_step, steps, parts, {"loss": loss})


ONES = [
    chosen("grad/a"),
    chosen("grad/b"),
    chosen("grad/c", mode=every(3)),
    chosen("update/d", shape=(2, 3)),
    chosen("grad/e", mode="final"),
]
