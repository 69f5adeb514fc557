"""Writing a timeline in Perfetto's format (https://ui.perfetto.dev opens it)."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import IO, Any

from tailrace.errors import OptionError
from tailrace.profiling.timeline.thinning import Bar, nested

_BEGIN, _END, _INSTANT, _COUNTER = 1, 2, 3, 4  # TrackEvent.Type
# Interned names belong to a sequence of packets: a reader drops packets that need them until one has
# said that the sequence starts without any.
_CLEARED, _NEEDS = 1, 2  # TracePacket.SequenceFlags
_SEQUENCE = 1


def check_perfetto() -> None:
    """Raise an error if the package is missing, before anything is recorded."""
    try:
        import perfetto.trace_builder.proto_builder  # noqa: F401
    except ImportError as error:
        raise OptionError(
            "A timeline is written by the package perfetto, which is not installed. "
            "Install it: pip install 'tailrace[trace]'."
        ) from error


class PerfettoFile:
    """One file: tracks and their events.

    Args:
        stream: a binary stream.
        process: the name of this process.
    """

    def __init__(self, stream: IO[bytes], process: str) -> None:
        from perfetto.trace_builder.proto_builder import StreamingTraceProtoBuilder

        self._builder = StreamingTraceProtoBuilder(stream)
        self._names: dict[str, int] = {}
        self._tracks = 0
        self._process = self._describe(name=process, process=process)

    # -- tracks ---------------------------------------------------------------------------------

    def thread(self, name: str) -> int:
        """A track for a thread of this process."""
        return self._describe(thread=name)

    def track(self, name: str, parent: int | None = None) -> int:
        """A track; one with child tracks is a group."""
        return self._describe(name=name, parent=self._process if parent is None else parent)

    def counter(self, name: str) -> int:
        """A track for values."""
        return self._describe(name=name, parent=self._process, counter=True)

    def _describe(
        self,
        name: str = "",
        parent: int | None = None,
        process: str | None = None,
        thread: str | None = None,
        counter: bool = False,
    ) -> int:
        packet = self._packet()
        if not self._tracks:
            packet.sequence_flags = _CLEARED
        self._tracks += 1
        described = packet.track_descriptor
        described.uuid = self._tracks
        if name:
            described.name = name
        if parent is not None:
            described.parent_uuid = parent
            described.sibling_order_rank = self._tracks
            described.child_ordering = 3  # EXPLICIT: by rank, in the order in which they were added
        if process is not None:
            described.process.pid = os.getpid()
            described.process.process_name = process
        if thread is not None:
            described.thread.pid = os.getpid()
            # Made up: the system reuses the ids of threads that have ended.
            described.thread.tid = os.getpid() + self._tracks
            described.thread.thread_name = thread
        if counter:
            # Present but empty: a message without fields would not be written.
            described.counter.SetInParent()
        self._builder.write_packet(packet)
        return self._tracks

    # -- events ---------------------------------------------------------------------------------

    def bars(self, track: int, bars: Sequence[Bar]) -> None:
        """Slices of one track."""
        # The format has begin and end events in order of time; an end closes the innermost slice.
        open_ends: list[int] = []
        for depth, bar in nested(bars):
            while len(open_ends) > depth:
                self._event(track, _END, open_ends.pop())
            self._event(track, _BEGIN, bar.start, bar.name, bar.about)
            if bar.end > bar.start:
                open_ends.append(bar.end)
            else:  # nothing is inside a slice without a duration
                self._event(track, _END, bar.end)
        while open_ends:
            self._event(track, _END, open_ends.pop())

    def values(self, track: int, values: Iterable[tuple[int, float]]) -> None:
        """The values of a counter, each with its time."""
        for time, value in values:
            packet = self._packet(time)
            packet.track_event.type = _COUNTER
            packet.track_event.track_uuid = track
            packet.track_event.double_counter_value = value
            self._builder.write_packet(packet)

    def note(self, track: int, time: int, name: str, about: Mapping[str, Any]) -> None:
        """An instant event."""
        self._event(track, _INSTANT, time, name, about)

    def _event(
        self, track: int, kind: int, time: int, name: str = "", about: Mapping[str, Any] = {}
    ) -> None:
        packet = self._packet(time)
        event = packet.track_event
        event.type, event.track_uuid = kind, track
        if name:
            packet.sequence_flags = _NEEDS
            event.name_iid = self._interned(packet, name)
        for key, value in about.items():
            if value is None:
                continue
            annotation = event.debug_annotations.add()
            annotation.name = key
            if isinstance(value, bool):
                annotation.bool_value = value
            elif isinstance(value, int):
                annotation.int_value = value
            elif isinstance(value, float):
                annotation.double_value = value
            else:
                annotation.string_value = str(value)
        self._builder.write_packet(packet)

    def _interned(self, packet: Any, name: str) -> int:
        """The id of a name; the first packet that uses it contains it."""
        if name not in self._names:
            self._names[name] = len(self._names) + 1
            entry = packet.interned_data.event_names.add()
            entry.iid, entry.name = self._names[name], name
        return self._names[name]

    def _packet(self, time: int | None = None) -> Any:
        packet = self._builder.create_packet()
        packet.trusted_packet_sequence_id = _SEQUENCE
        if time is not None:
            packet.timestamp = time
        return packet
