"""Files that say something other than what was written: a sentence, never a traceback or wrong rows."""

import json
import random

import pytest

import tailrace as tr
from changed_json import changed, places

WRONG = (None, -1, 10**15, "x", [], {}, 1.5, ["a", "b"], {"a": 1})


def read_everything(directory):
    run = tr.open_run(directory)
    texts = [
        repr(run),
        run._repr_html_(),
        repr(run.records),
        run.catalogue.to_text(),
        repr(run.plan),
    ]
    found = [run.records[pair] for pair in run.records]
    found += [run.executions, run.nonfinite_reports]
    return texts, found, {name: run.history[name] for name in run.history}


@pytest.mark.filterwarnings("ignore")
def test_any_wrong_description_is_answered_with_a_sentence(finished):
    files = sorted([finished / "run.json", *finished.rglob("zarr.json")])
    plain = {file: file.read_text() for file in files}
    cases = [
        (file, path, new)
        for file, text in plain.items()
        for path in places(json.loads(text))
        for new in WRONG
    ]
    said = []
    for file, path, new in random.Random(0).sample(cases, 120):
        file.write_text(changed(plain[file], path, new))
        try:
            read_everything(finished)
        except tr.TailraceError as error:
            said.append(str(error))
        file.write_text(plain[file])
    assert len(said) > 30
    assert all(str(finished) in text for text in said)
    read_everything(finished)


def test_a_changed_or_empty_chunk_is_never_read(finished):
    chance = random.Random(0)
    only_for_others = ("tensor", "microbatch", "replica")  # coordinates for xarray, in some groups
    for file in sorted(finished.rglob("c.*")):
        array = file.relative_to(finished).parts
        unread = array[2] == "tensor" or (array[0] == "history" and array[1] in only_for_others)
        if unread:
            continue
        whole = file.read_bytes()
        flipped = bytearray(whole)
        flipped[chance.randrange(len(whole))] ^= 1 << chance.randrange(8)
        for content in (bytes(flipped), b"", whole[:3], whole[:-1]):
            file.write_bytes(content)
            with pytest.raises(tr.errors.RunError, match=r"is damaged: .* cannot be read"):
                read_everything(finished)
        file.write_bytes(whole)
    read_everything(finished)


@pytest.mark.parametrize("count", [-1, "x", None])
def test_wrong_counts(finished, count):
    text = (finished / "zarr.json").read_text()
    for path in (("attributes", "committed", "history"), ("attributes", "committed", "records", 0)):
        (finished / "zarr.json").write_text(changed(text, path, count))
        with pytest.raises(tr.errors.RunError, match="is damaged: zarr.json cannot be read"):
            tr.open_run(finished)


def test_a_damaged_plan(finished):
    info = json.loads((finished / "run.json").read_text())
    (finished / "run.json").write_text(json.dumps({**info, "plan": "{}"}))
    with pytest.raises(tr.TailraceError):
        _ = tr.open_run(finished).plan


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("zarr.json", '"history": 20', '"history": 16'),
        ("history/zarr.json", '"loss"', '"lost"'),
        ("records/0/zarr.json", "grad/", "grab/"),
    ],
)
def test_counts_and_names_have_checksums(finished, file, old, new):
    """Sixteen rows are a number as good as twenty, and any text is a name."""
    text = (finished / file).read_text()
    assert old in text
    (finished / file).write_text(text.replace(old, new))
    with pytest.raises(tr.errors.RunError, match=r"is damaged: .* is not what was written"):
        read_everything(finished)


@pytest.mark.parametrize("column", ["executions/epoch", "executions/element_count"])
def test_an_optional_column_without_its_description(finished, column):
    (finished / column / "zarr.json").unlink()
    with pytest.raises(
        tr.errors.RunError, match=f"description of {column.split('/')[1]} is missing"
    ):
        read_everything(finished)
