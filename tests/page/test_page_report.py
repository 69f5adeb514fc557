"""`tailrace report`: one file that needs nothing else, with what the run has and nothing more."""

import base64
import re
import struct
import zipfile
import zlib
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from made_runs import NAMES, MadeRun, add_report, falling, healthy_stats

import tailrace as tr
from tailrace.cli.command_line import main
from tailrace.errors import RunError
from tailrace.page.colours import palette, shades
from tailrace.page.followed import FollowedRun
from tailrace.page.report.charts import ticks
from tailrace.page.report.png import png
from tailrace.page.report.report import report_html, write_report

HOSTILE = "grad/<script>alert(1)</script>"


class Reader(HTMLParser):
    """The headings of a page, its tags and all addresses in it."""

    def __init__(self, text):
        super().__init__()
        self.headings, self.addresses, self.tags = [], [], []
        self._inside = ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self._inside = tag
        self.addresses += [v for k, v in attributes if k in ("src", "href", "action") and v]

    def handle_data(self, data):
        if self._inside == "h2":
            self.headings.append(data)

    def handle_endtag(self, tag):
        self._inside = ""


def test_the_command_prints_and_writes_into_the_run(made, capsys):
    assert main(["report", str(made.directory)]) == 0
    out, _ = capsys.readouterr()
    path = made.directory / "report.html"
    assert "loss" in out
    assert out.endswith(f"Saved {path}\n")
    page = Reader(path.read_text(encoding="utf-8"))
    assert page.headings == [
        "Numbers",
        "Findings",
        "Loss",
        "Accuracy",
        "Speed, steps a second",
        "Gradients: root mean square",
        "Activations: root mean square",
        "Activations: share of zeros",
        "Tensors, in the last quarter of the run",
        "Program",
        "Options",
        "Taps",
        "Versions",
    ]


def test_it_needs_no_network_and_no_script(made):
    text = report_html(FollowedRun(made.directory))
    page = Reader(text)
    assert "script" not in page.tags
    assert all(address.startswith("data:image/png;base64,") for address in page.addresses)
    assert not re.findall(r"url\(|@import|https?://(?!www\.w3\.org/2000/svg)", text)
    assert "default-src 'none'" in text


def test_sections_without_data_are_left_out(tmp_path):
    run = MadeRun(tmp_path / "bare", [])
    run.grow({"loss": falling(5)})
    assert Reader(report_html(FollowedRun(run.directory))).headings == [
        "Numbers",
        "Findings",
        "Loss",
        "Program",
        "Options",
        "Taps",
        "Versions",
    ]


def test_a_pipeline_and_nan_have_their_sections(tmp_path):
    plan = tr.plan(stages=2, microbatches=4)
    run = MadeRun(tmp_path / "run", NAMES, plan=plan, info={"config": {"rate": 0.1}})
    nan = np.zeros((60, len(NAMES)), int)
    nan[50, 6] = 2
    run.grow({"loss": falling(60)}, stats={**healthy_stats(60), "nan": nan})
    add_report(run.directory)
    text = report_html(FollowedRun(run.directory))
    found = Reader(text).headings
    assert {"Pipeline", "Where NaN and Inf are", "Config"} <= set(found)
    assert "Not finite in step 7" in text
    assert re.search(r"<th>grad/layer1/w</th><td>0.01</td><td>0.0 %</td><td>2</td>", text)


def test_updates_have_their_ratio(tmp_path):
    run = MadeRun(tmp_path / "run", ["param/w", "update/w"])
    std = np.broadcast_to([0.1, 2e-4], (60, 2))
    run.grow({"loss": falling(60)}, stats={"std": std})
    text = report_html(FollowedRun(run.directory))
    assert re.search(r"<th>update/w</th><td>0.0002</td><td>0.0 %</td><td>0.002</td>", text)


def test_names_from_a_run_are_text(tmp_path):
    directory = tmp_path / "<b>run"
    run = MadeRun(directory, [HOSTILE], info={"config": {HOSTILE: HOSTILE}})
    run.grow({"loss": falling(60), HOSTILE: falling(60)}, stats={"std": np.ones((60, 1))})
    add_report(directory, text=HOSTILE)
    page = Reader(report_html(FollowedRun(directory)))
    assert "script" not in page.tags
    assert page.tags.count("b") == 1  # the topic of the one finding
    assert "Grad/<script>alert(1)</script>" in page.headings


def test_another_place_and_one_that_cannot_be_written(made, tmp_path):
    path = write_report(made.directory, tmp_path / "other.html")
    assert path.read_text(encoding="utf-8").startswith("<!doctype html>")
    with pytest.raises(
        RunError, match="cannot be written: No such file or directory. Make the folder"
    ):
        write_report(made.directory, tmp_path / "nowhere" / "x.html")


def test_a_picture_holds_the_values_it_was_made_of():
    values = np.array([[1e-3, 1.0], [np.nan, 0.0]])
    indices = shades(values, 1e-3, 1.0, log=True)
    assert indices.tolist() == [[0, 253], [255, 0]]
    data = png(indices, palette())
    width, height = struct.unpack(">II", data[16:24])
    assert (width, height) == (2, 2)
    start = data.index(b"IDAT") + 4
    raw = zlib.decompress(data[start : data.index(b"IEND") - 8])
    assert [raw[1:3], raw[4:6]] == [bytes([0, 253]), bytes([255, 0])]
    assert base64.b64encode(data)


@pytest.mark.parametrize(("low", "high"), [(0, 1), (1e-9, 2e-9), (-3, 7), (5, 5), (0, 1e9)])
def test_ticks_are_few_round_and_inside(low, high):
    found = ticks(float(low), float(high))
    assert 1 <= len(found) <= 8
    assert all(low - 1e-12 <= tick <= high + 1e-12 for tick in found)


def test_the_wheel_has_the_files_of_the_page(tmp_path):
    hatchling = pytest.importorskip("hatchling.builders.wheel", reason="builds a wheel")
    root = Path(__file__).parents[2]
    (built,) = hatchling.WheelBuilder(str(root)).build(directory=str(tmp_path))
    inside = set(zipfile.ZipFile(built).namelist())
    static = root / "src" / "tailrace" / "page" / "static"
    wanted = {p.relative_to(root / "src").as_posix() for p in static.rglob("*") if p.is_file()}
    wanted = {name for name in wanted if "__pycache__" not in name}
    assert wanted <= inside
    assert "tailrace/page/static/uplot/LICENSE" in inside
    assert not [name for name in inside if "axe" in name.rpartition("/")[2]]
