"""How much one dispatch takes: every number that was tuned for it, with what it was measured for.

The rules that use them are elsewhere: `program/running/dispatch_lengths.py` cuts loops;
`trainer/fitting/pace.py`, `keras/programs/pacing.py` and `torch/programs/portions.py` choose lengths
for `tr.Trainer`, Keras and PyTorch. They read a number as `dispatch_table.NAME`: changing it here
changes it everywhere. The room of feeds has the table because the data benchmark needs it too.
"""

from __future__ import annotations

from tailrace.devices import devices

# -- every front end ----------------------------------------------------------------------------

MOST_BYTES = {"cpu": 24 << 20}
MOST_BYTES_ELSEWHERE = 128 << 20
"""Elements of one dispatch, in bytes, if nothing else says how long it is to be.

On a CPU, below 32 MiB the C library hands freed memory out again; above, every block is mapped anew and
its pages are cleared by the kernel, which costs a tenth of the time of a small step. On an accelerator
a dispatch costs the host about a millisecond while the device waits (H200), and moving this much 14.
"""

LONGEST = 4096
"""Passes of one dispatch, however short they are and however little they read.

What an executable has room for is fixed when it is compiled. At 20 microseconds a step this is 80 ms,
beside which a dispatch of 0.1 ms does not count.
"""

FIXED_BELOW_S = 1.5e-3
"""Passes that take less on an accelerator run in a loop of fixed length, once that is compiled.

A loop whose length is data costs 15 microseconds a pass more there (measured on an H200): one percent
of this. On a CPU it costs nothing.
"""

LIVE_S = 0.05
"""Seconds of a dispatch of a loop with a live outfeed: what is sent is seen 20 times a second."""

# -- tr.Trainer: steps_per_execution="auto" -------------------------------------------------------

TARGET_S = 0.25
"""Seconds of one execution: a dispatch of 0.1 ms vanishes, and the host sees results often."""

TRIAL = 10
"""The most steps of the first executions, whose time is measured."""

RECORD_BYTES = 128 << 20
"""Records of one execution of automatic length, in bytes.

An executable has buffers for the records of its longest execution, and clears them in each: this many
bytes take 10 to 40 ms on a CPU, a tenth of an execution.
"""

OVERHEADS = 10
"""An execution takes at least this many times its own cost, as far as LONGEST_S allows."""

LONGEST_S = 2.0
"""Seconds of an automatic execution at most: nothing is seen or saved while it runs."""

ALONE_S = 1.0
"""Steps that take longer are measured one at a time; of shorter ones two together are tried too."""

TRIALS = 3
"""How many of them are measured: the first ones after a compilation take several times as long."""

# -- Keras --------------------------------------------------------------------------------------

LONG_S = 1.0
"""An execution that takes longer is cut, so that the progress bar moves while it runs."""

TOGETHER = 128
"""Executions of fewer batches run together, up to this many batches, while no callback listens.

Longer ones are cut into pieces of this many where only the numbers of rows are read: the first piece
starts sooner. Measured for Keras' own small models, whose step takes less than a dispatch.
"""

SHORTEST = 4
"""Pieces of one length may be this many times as short as they could be: one compilation less."""

PIECES = 10
"""Into how many pieces an execution is cut whose steps are reported while it runs."""

QUIET_FROM = 32
"""Metrics of this many steps and more are computed once, behind them, if none is reported alone."""

THREAD_FROM = 8
"""Blocks of this many batches are staged by a thread; handing over shorter ones costs more."""

IN_FLIGHT, MOST_IN_FLIGHT = 2, 64
"""Dispatches that may be on their way at a time: of long ones, and of the shortest."""

# -- PyTorch: a call is one execution -------------------------------------------------------------

PORTION_BYTES = 9 << 18
"""The elements of a portion, in bytes: with less, dispatching it takes as long as moving them."""

MOST_PORTIONS = 16
"""More do not make the way to the device faster (measured on a GPU)."""

PORTIONS_AHEAD = 8
"""The elements of this many portions travel at a time: one copy does not fill the bus."""

# -- IPU programs -------------------------------------------------------------------------------

UNSAID_BYTES = 1 << 28
UNSAID_PASSES = LONGEST
"""What a fed while loop stages at most that does not say how many passes it makes."""


def most_bytes() -> int:
    """The elements of one dispatch, in bytes, on the platform in use."""
    return MOST_BYTES.get(devices.platform(), MOST_BYTES_ELSEWHERE)
