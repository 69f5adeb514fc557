"""Reading a timeline back, with the protos of Perfetto alone."""

import dataclasses
import itertools
from collections import defaultdict

from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace

BEGIN, END, INSTANT, COUNTER = 1, 2, 3, 4


@dataclasses.dataclass(frozen=True)
class Read:
    """A slice that was read."""

    name: str
    start: int
    end: int
    depth: int
    about: dict

    @property
    def seconds(self):
        return (self.end - self.start) * 1e-9


class Timeline:
    """Tracks by their path; `slices[path]`, `values[name]`, `notes`."""

    def __init__(self, path):
        trace = Trace.FromString(path.read_bytes())
        self.names, parents, interned = {}, {}, {}
        self.slices, self.values, self.notes = defaultdict(list), defaultdict(list), {}
        events = defaultdict(list)
        for packet in trace.packet:
            for entry in packet.interned_data.event_names:
                interned[entry.iid] = entry.name
            if packet.HasField("track_descriptor"):
                described = packet.track_descriptor
                name = described.name or described.thread.thread_name
                assert described.uuid not in self.names, "two tracks with one number"
                self.names[described.uuid] = name
                parents[described.uuid] = described.parent_uuid
            elif packet.HasField("track_event"):
                event = packet.track_event
                assert event.track_uuid in self.names, "an event on a track that is not described"
                if event.name_iid:
                    assert packet.sequence_flags == 2, "a name by number needs the state before"
                events[event.track_uuid].append((packet.timestamp, event))
        self.paths = {}
        for uuid, name in self.names.items():
            parent = self.names.get(parents[uuid], "")
            path_ = f"{parent}/{name}" if parent and not parent.startswith("tailrace:") else name
            self.paths[uuid] = path_
        for uuid, found in events.items():
            self._track(self.paths[uuid], found, interned)

    def _track(self, path, events, interned):
        stack, last = [], 0
        for time, event in events:
            if event.type == COUNTER:
                self.values[path].append((time, event.double_counter_value))
                continue
            about = {a.name: _value(a) for a in event.debug_annotations}
            if event.type == INSTANT:
                self.notes[interned[event.name_iid]] = about
                continue
            assert time >= last, f"{path}: time runs backwards"
            last = time
            if event.type == BEGIN:
                stack.append((interned[event.name_iid], time, about))
            else:
                name, start, about = stack.pop()
                self.slices[path].append(Read(name, start, time, len(stack), about))
        assert not stack, f"{path}: {stack} never end"

    def named(self, name):
        """All slices of a name, on whatever track."""
        return [one for found in self.slices.values() for one in found if one.name == name]


def _value(annotation):
    return getattr(annotation, annotation.WhichOneof("value"))


def no_overlap(slices):
    """Whether slices of one track follow each other."""
    ordered = sorted(slices, key=lambda one: (one.start, one.end))
    return all(a.end <= b.start for a, b in itertools.pairwise(ordered))
