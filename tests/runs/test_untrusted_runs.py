"""A run from elsewhere: nothing in it is waited for, executed, or believed about its size."""

import json
import os
import tracemalloc

import numcodecs
import numpy as np
import pytest
import zarr
from test_damaged_runs import read_everything

import tailrace as tr
from tailrace.runs.profiles import read_profile
from tailrace.runs.storage.compression import codecs
from tailrace.runs.tables.stored import MOST_DENSE


def described(finished, path, change):
    file = finished / path
    about = json.loads(file.read_text())
    change(about)
    file.write_text(json.dumps(about))


@pytest.mark.parametrize("name", ["run.json", "zarr.json", "history/zarr.json", "history/step/c.0"])
def test_a_pipe_is_not_waited_for(finished, name):
    (finished / name).unlink()
    os.mkfifo(finished / name)
    with pytest.raises(tr.errors.RunError, match=r"regular files are read|is missing"):
        read_everything(finished)


@pytest.mark.parametrize("name", ["run.json", "zarr.json", "history/zarr.json"])
def test_a_device_without_end_is_not_read(finished, name):
    (finished / name).unlink()
    (finished / name).symlink_to("/dev/zero")
    with pytest.raises(tr.errors.RunError, match="regular files are read"):
        read_everything(finished)


@pytest.mark.parametrize("name", ["run.json", "zarr.json", "history/zarr.json"])
def test_deep_json(finished, name):
    (finished / name).write_text("[" * 100_000 + "]" * 100_000)
    with pytest.raises(tr.errors.RunError, match="is damaged"):
        read_everything(finished)


BESIDE = ["compilations.json", "interventions.json", "nonfinite.json", "profile.json"]
"""What happened to a run, and its profile: a run can be read without them."""


def read_beside(directory):
    run = tr.open_run(directory)
    happened = [*run.compilations, *run.interventions, *run.nonfinite_reports]
    return happened or read_profile(directory)


@pytest.mark.parametrize("name", BESIDE)
def test_a_file_beside_the_tables_that_cannot_be_read_is_none(finished, name):
    """A pipe, a device, and JSON too deep or of another kind: nothing is waited for or raised."""
    for other in BESIDE:
        (finished / other).unlink(missing_ok=True)
    os.mkfifo(finished / name)
    assert read_beside(finished) is None
    (finished / name).unlink()
    (finished / name).symlink_to("/dev/zero")
    assert read_beside(finished) is None
    (finished / name).unlink()
    for text in ("[" * 100_000 + "]" * 100_000, '{"kind": "rewind"}', "[1, null]", "no JSON"):
        (finished / name).write_text(text)
        assert read_beside(finished) is None


def test_a_large_description_is_not_read(finished):
    with (finished / "run.json").open("r+b") as file:
        file.truncate(1 << 30)  # a hole: it takes no room on the disk
    with pytest.raises(tr.errors.RunError, match=r"takes 1,073,741,824 .*READ_LIMIT=65GiB"):
        tr.open_run(finished)


def test_a_small_chunk_that_claims_to_be_large(finished):
    """A chunk whose own header, or whose array, declares far more than it can hold."""
    file = finished / "history/metric0/c.0.0.0"
    bomb = numcodecs.Blosc("lz4").encode(np.zeros(1 << 26, np.uint8))
    file.write_bytes(bytes(bomb) + bytes(4))
    tracemalloc.start()
    with pytest.raises(tr.errors.RunError, match="says that it is 67,108,864, where 65,536"):
        _ = tr.open_run(finished).history
    assert tracemalloc.get_traced_memory()[1] < 1 << 25
    tracemalloc.stop()


def test_an_array_that_declares_large_chunks(finished):
    def enlarge(about):
        about["chunk_grid"]["configuration"]["chunk_shape"][0] = 1 << 24

    described(finished, "history/metric0/zarr.json", enlarge)
    with pytest.raises(tr.errors.RunError, match="where 67,108,864 are expected"):
        _ = tr.open_run(finished).history


def test_rows_that_are_not_there(finished):
    """Declared by the array and by the counts alike: the first chunk that is missing ends it."""

    def rows(about):
        about["shape"][0] = 1 << 50

    for array in ("step", "metric0", "metric1"):
        described(finished, f"history/{array}/zarr.json", rows)

    def counts(about):
        about["attributes"]["committed"]["history"] = 1 << 50
        del about["attributes"]["committed"]["checksum"]  # who means harm could compute it

    described(finished, "zarr.json", counts)
    with pytest.raises(
        tr.errors.RunError, match=r"takes .* bytes, and at most 4,294,967,296 are read"
    ):
        _ = tr.open_run(finished).history


def test_the_limit_can_be_raised_and_lowered(finished, monkeypatch):
    assert len(tr.open_run(finished).history) == 20
    text = "history/metric0 of the run .* takes 65,536 bytes, and at most 20,000 .*raise the limit"
    with pytest.raises(tr.errors.RunError, match=text):
        _ = tr.open_run(finished, limit=20_000).history
    monkeypatch.setenv("TAILRACE_READ_LIMIT", "1KiB")
    with pytest.raises(tr.errors.RunError, match="TAILRACE_READ_LIMIT=1GiB"):
        _ = tr.open_run(finished).history
    assert len(tr.open_run(finished, limit="1GiB").history) == 20
    monkeypatch.setenv("TAILRACE_READ_LIMIT", "lots")
    with pytest.raises(tr.errors.OptionError, match="TAILRACE_READ_LIMIT is the most .*='lots'"):
        tr.open_run(finished)


@pytest.mark.parametrize("limit", [0, -1, 1.5, True, "x", "5 bytes", b"1"])
def test_limits_that_are_none(finished, limit):
    with pytest.raises(tr.errors.OptionError, match="limit is the most that one array"):
        tr.open_run(finished, limit=limit)


@pytest.mark.parametrize(
    "more",
    [
        [{"name": "gzip", "configuration": {"level": 1}}],
        [],
        [{"name": "numcodecs.pickle", "configuration": {}}],
    ],
)
def test_other_codecs_are_not_run(finished, more):
    plain = {"name": "bytes", "configuration": {"endian": "little"}}
    described(finished, "history/metric0/zarr.json", lambda a: a.update(codecs=[plain, *more]))
    with pytest.raises(tr.errors.RunError, match="is damaged: history"):
        _ = tr.open_run(finished).history


@pytest.mark.parametrize("given", [5, None, b"x", ["a"], 1.5])
def test_what_is_no_path(given):
    with pytest.raises(tr.errors.OptionError, match="takes the path of a run directory"):
        tr.open_run(given)


def test_real_chunks_are_never_denser_than_the_limit(tmp_path):
    """The bound holds for the densest there is: zeros."""
    for dtype in ("float32", "int64"):
        for count in (1 << 14, 1 << 20):
            array = zarr.create_array(
                store=str(tmp_path / f"{dtype}{count}"),
                data=np.zeros(count, dtype),
                chunks=(count,),
                compressors=codecs(),
                chunk_key_encoding={"name": "default", "separator": "."},
                config={"write_empty_chunks": True},
            )
            (file,) = (tmp_path / f"{dtype}{count}").glob("c.*")
            assert array.nbytes <= MOST_DENSE * file.stat().st_size
