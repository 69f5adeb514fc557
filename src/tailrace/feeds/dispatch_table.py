"""The size of one dispatch: every tuned constant, with the measurement behind it.

The rules that use them are elsewhere: `program/running/dispatch_lengths.py` cuts loops;
`trainer/fitting/pace.py`, `keras/programs/pacing.py` and `torch/programs/portions.py` choose lengths
for `tr.Trainer`, Keras and PyTorch. They read a constant as `dispatch_table.NAME`, so that a change
here applies everywhere. The table is in `feeds` because the data benchmark needs it too.
"""

from __future__ import annotations

from tailrace.devices import devices

# -- every front end ----------------------------------------------------------------------------

MOST_BYTES = {"cpu": 24 << 20}
MOST_BYTES_ELSEWHERE = 128 << 20
"""The elements of one dispatch, in bytes, if nothing else determines its length.

On a CPU, the C library reuses freed memory below 32 MiB. Above, every block is mapped again and the
kernel clears its pages, which costs a tenth of the time of a small step. On an accelerator a dispatch
costs the host about a millisecond while the device waits (H200), and transferring this many bytes
takes 14 milliseconds.
"""

LONGEST = 4096
"""The most iterations of one dispatch, however short they are and however little they read.

The capacity of an executable is fixed when it is compiled. At 20 microseconds a step this is 80 ms, so
that a dispatch of 0.1 ms is negligible.
"""

FIXED_BELOW_S = 0.05
"""Shorter iterations on an accelerator run in a loop of fixed length, once it is compiled.

The host must read the condition of a loop whose length is data before it launches the next iteration,
and the device waits meanwhile (H200): 15 microseconds for a small perceptron, 0.2 to 0.35 ms for GPT-2
small, ResNet-18 and an LSTM. Half a percent of this. On a CPU there is no difference.
"""

FIXED_WORTH = 2.0
"""A loop of fixed length is compiled if training takes this many times as long as its compilation."""

LIVE_S = 0.05
"""Seconds of a dispatch of a loop with a live outfeed: values arrive 20 times a second."""

# -- tr.Trainer: steps_per_execution="auto" -------------------------------------------------------

TARGET_S = 0.25
"""Seconds of one execution: a dispatch of 0.1 ms is negligible, and the host often gets results."""

TRIAL = 10
"""The most steps of the first executions, whose time is measured."""

RECORD_BYTES = 128 << 20
"""Records of one execution of automatic length, in bytes.

An executable has buffers for the records of its longest execution and clears them in each execution.
For this many bytes that takes 10 to 40 ms on a CPU, a tenth of an execution.
"""

OVERHEADS = 10
"""An execution is at least this many times as long as its overhead, if LONGEST_S allows it."""

LONGEST_S = 2.0
"""The most seconds of an execution of automatic length: nothing is reported or saved while it runs."""

ALONE_S = 1.0
"""Longer steps are measured one at a time; for shorter ones, two together are tried too."""

TRIALS = 3
"""The number of measurements: the first runs after a compilation take several times as long."""

# -- Keras --------------------------------------------------------------------------------------

LONG_S = 1.0
"""An execution that takes longer is cut, so that the progress bar moves while it runs."""

TOGETHER = 128
"""Executions of fewer batches run together, up to this many batches, while no callback listens.

Longer ones are cut into pieces of this many batches if only row numbers are read: the first piece
starts sooner. Measured for Keras' own small models, whose step takes less time than a dispatch.
"""

SHORTEST = 4
"""Pieces of equal length may be shorter than possible by this factor: it saves a compilation."""

PIECES = 10
"""The number of pieces of an execution whose steps are reported while it runs."""

QUIET_FROM = 32
"""From this many steps on, metrics are computed once, after them, if no step is reported alone."""

THREAD_FROM = 8
"""Blocks of this many batches are staged by a thread; handing over shorter ones costs more."""

IN_FLIGHT, MOST_IN_FLIGHT = 2, 64
"""The most dispatches in flight: of long ones, and of the shortest."""

# -- PyTorch: a call is one execution -------------------------------------------------------------

PORTION_BYTES = 9 << 18
"""The elements of a portion, in bytes: with fewer, its dispatch takes as long as their transfer."""

MOST_PORTIONS = 16
"""More portions do not speed up the transfer (measured on a GPU)."""

PORTIONS_AHEAD = 8
"""The number of portions transferred at a time: one copy does not saturate the bus."""

# -- IPU programs -------------------------------------------------------------------------------

UNSAID_BYTES = 1 << 28
UNSAID_PASSES = LONGEST
"""The most that a fed while loop stages if it does not say how many iterations it runs."""


def most_bytes() -> int:
    """The elements of one dispatch, in bytes, on the platform in use."""
    return MOST_BYTES.get(devices.platform(), MOST_BYTES_ELSEWHERE)
