"""A disk that loses everything that was not forced to it: what counted before is still there.

The model is the worst that a file system may do. A file keeps its content once it was forced; a name
keeps its file once the folder was forced; of everything later the disk has any part, in any order.
"""

import random

from made_parts import ONES, execution
from test_run_crash import check_whole

import tailrace as tr
from tailrace.runs import write_queue
from tailrace.runs.storage import durable
from tailrace.runs.writer import RunWriter


class Disk:
    """Follows the files of a directory, and lists what it may hold if the power goes."""

    def __init__(self, monkeypatch):
        self.forced = set()  # partial files whose content is on the disk
        self.names = {}  # path: [contents it had since its folder was forced, oldest first]
        self.counted = 0  # the steps of which the writer has said that they are on the disk
        self.moments = []  # names and counted, after each thing that happened
        plain = {
            name: getattr(durable, name) for name in ("sync_file", "sync_folder", "rename_file")
        }

        def force(root, path):
            plain["sync_file"](root, path)
            self.forced.add(path)
            self.remember()

        def force_folder(root, folder):
            plain["sync_folder"](root, folder)
            for name, versions in self.names.items():
                if name.rpartition("/")[0] == folder:
                    del versions[:-1]
            self.remember()

        def rename(root, path, name):
            content = (root.path / path).read_bytes()
            whole = path in self.forced
            self.forced.discard(path)
            plain["rename_file"](root, path, name)
            self.names.setdefault(name, [None]).append(content if whole else b"")
            self.remember()

        monkeypatch.setattr(durable, "sync_file", force)
        monkeypatch.setattr(durable, "sync_folder", force_folder)
        monkeypatch.setattr(durable, "rename_file", rename)
        monkeypatch.setattr(durable, "MOST_AT_ONCE", 1)  # one thing after the other

    def remember(self):
        names = {name: list(found) for name, found in self.names.items()}
        self.moments.append((names, self.counted))

    def after_a_cut(self, moment, choose, target):
        """What may be left of the directory if the power went then."""
        for name, versions in self.moments[moment][0].items():
            content = choose(versions)
            if content is not None:
                path = target / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)


def test_what_counted_survives_a_loss_of_power(tmp_path, monkeypatch):
    monkeypatch.setattr(write_queue, "WRITE_EVERY_S", 1e9)
    disk = Disk(monkeypatch)
    sink = RunWriter(tmp_path / "run")
    with sink.fitting({"catalogue": []}):
        for number in range(3):
            sink.execution(execution(number * 3, 3, [ONES[0], ONES[3]]))
            sink.flush()
            disk.counted += 3
    chance = random.Random(0)
    worst = [lambda found: found[0], lambda found: found[-1], chance.choice, chance.choice]
    seen = set()
    for moment in sorted(chance.sample(range(len(disk.moments)), 80)):
        left = tmp_path / f"left{moment}"
        disk.after_a_cut(moment, worst[moment % len(worst)], left)
        if (left / "run.json").exists():
            count = check_whole(tr.open_run(left))
            assert count >= disk.moments[moment][1]
            seen.add(count)
    assert seen >= {0, 3, 6}
