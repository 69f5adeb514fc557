"""The server: who may read, what it answers, and what it does with runs that cannot be read."""

import asyncio
import contextlib
import http.client
import itertools
import json
import logging
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
from urllib.parse import quote

import numpy as np
import pytest
from made_runs import NAMES, MadeRun, falling, healthy_stats
from served_page import Served

import tailrace as tr
from changed_json import changed, places
from tailrace.cli.command_line import main
from tailrace.errors import MissingDependency, OptionError, RunError
from tailrace.page import followed
from tailrace.page.followed import FollowedRun
from tailrace.page.report.report import write_report
from tailrace.page.server.answers import Answers
from tailrace.page.server.app import QUESTIONS, as_json, static_file
from tailrace.page.server.serve import serve
from tailrace.page.terminal.show import pictured
from waits import LIMIT_S

STATIC = ["look.css", "page.css", "page.js", "icon.svg", "uplot/uPlot.iife.min.js"]


def test_the_address_with_its_token_shows_the_page(made, served):
    page = served(made.directory)
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/\?token=[\w-]{32}", page.address)
    status, headers, body = page.get(f"/?token={page.token}")
    assert status == 200
    assert headers["content-type"].startswith("text/html")
    assert b'<script type="module"' in body
    for name in STATIC:
        assert page.get(f"/{page.token}/static/{name}")[0] == 200


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/", 401),
        ("/?token=", 401),
        ("/?token=wrong", 403),
        ("/?other=1", 401),
        ("/api/overview", 403),
        ("/events", 401),
        ("/wrong/api/overview", 403),
        ("/wrong/static/page.js", 403),
        ("/static/page.js", 403),
        ("//", 401),
        ("/%00/", 403),
    ],
)
def test_without_the_token_nothing_is_read(made, served, path, status):
    found, headers, body = served(made.directory).get(path)
    assert found == status
    assert "Content-Security-Policy".lower() in headers
    assert b"made" not in body


def test_a_token_that_is_nearly_right_is_refused(made, served):
    page = served(made.directory)
    near = page.token[:-1] + ("a" if page.token[-1] != "a" else "b")
    for token in (near, page.token[:-1], page.token + "x", "%C3%A9%F0%9F%92%A5", "%ff", "%00"):
        assert page.get(f"/?token={token}")[0] == 403
        assert page.get(f"/{token}/api/overview")[0] == 403


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "127.0.0.2", "[::2]", ""]
)
def test_a_foreign_host_name_is_refused(made, served, host):
    page = served(made.directory)
    if host:
        assert page.get(f"/?token={page.token}", host=host)[0] == 403
        assert page.get(f"/?token={page.token}", host=f"{host}:{page.port}")[0] == 403
        return
    with socket.create_connection(("127.0.0.1", page.port)) as plain:
        plain.sendall(f"GET /?token={page.token} HTTP/1.0\r\n\r\n".encode())
        assert b" 403 " in plain.recv(100)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:9999", "localhost:80", "[::1]:1"])
def test_names_of_this_machine_are_taken_with_any_port(made, served, host):
    page = served(made.directory)
    assert page.get(f"/?token={page.token}", host=host)[0] == 200


def test_headers_let_the_browser_load_nothing_from_elsewhere(made, served):
    page = served(made.directory)
    for path in (f"/?token={page.token}", f"/{page.token}/api/overview", "/"):
        headers = {name.lower(): value for name, value in page.get(path)[1].items()}
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "http" not in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["cache-control"] == "no-store"
        assert "set-cookie" not in headers


def test_only_reading_is_allowed(made, served):
    page = served(made.directory)
    for method in ("POST", "PUT", "DELETE"):
        assert page.get(f"/{page.token}/api/overview", method=method)[0] == 405


@pytest.mark.parametrize(
    "path",
    ["../server/app.py", "..%2f__init__.py", "__init__.py", "/etc/passwd", "", "uplot/LICENSE"],
)
def test_only_files_of_the_page_are_served(made, served, path):
    page = served(made.directory)
    assert page.get(f"/{page.token}/static/{path}")[0] == 404


@pytest.mark.parametrize(
    "path", ["../x.js", "a\\..\\x.js", "./look.css", "uplot//uPlot.min.css", "no.js"]
)
def test_paths_that_point_elsewhere_are_no_files(path):
    from importlib.resources import files

    assert static_file(files("tailrace.page.static"), path) is None


def test_the_page_listens_on_the_loopback_interface_only(made, served):
    page = served(made.directory)
    addresses = {info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None)}
    for address in addresses - {"127.0.0.1", "127.0.1.1", "::1"}:
        with pytest.raises(OSError, match="."):
            socket.create_connection((address, page.port), timeout=1)


def test_what_the_page_asks_for(made, served):
    page = served(made.directory)
    (run,) = page.ask("overview")["runs"]
    assert (run["name"], run["steps"], run["problem"]) == ("made", 200, "")
    (curves,) = page.ask("curves")
    assert list(curves["curves"]) == ["loss", "accuracy", "steps/s"]
    assert len(curves["curves"]["loss"]["steps"]) == 200
    (part,) = page.ask("curves", first=50, last=59)
    assert part["curves"]["loss"]["steps"] == list(range(50, 60))
    assert page.ask("findings") == [{"run": 0, "problem": "", "findings": []}]
    found = page.ask("catalogue", runs="0", search="grad LAYER2")
    assert [one["name"] for one in found["tensors"]] == ["grad/layer2/w", "grad/layer2/b"]
    (tensor,) = page.ask("tensor", name="grad/layer0/w")
    assert tensor["kinds"] == ["stats", "histogram"]
    assert tensor["exponents"]["columns"] == 200
    assert tensor["exponents"]["sentences"][0].startswith("float16: ")
    (layers,) = page.ask("layers", measure="rms", select="grad/*")
    assert layers["names"] == NAMES[4:]
    assert (layers["columns"], layers["width"]) == (200, 1)
    assert page.ask("plan")[0]["grid"] is None
    assert page.ask("about")[0]["sections"]["Options"][0] == ["steps_per_execution", "10"]


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("layers?measure=size", "A measure is one of rms, zero, nonfinite. Received: 'size'."),
        ("cell?stage=x", "stage is a whole number. Received: 'x'."),
        ("catalogue?runs=7", "There is no run with the number '7'."),
    ],
)
def test_questions_that_make_no_sense_are_answered_in_a_sentence(made, served, path, text):
    page = served(made.directory)
    status, _, body = page.get(f"/{page.token}/api/{path}")
    assert status == 400
    assert json.loads(body) == {"problem": text}


def test_numbers_that_json_has_no_place_for(tmp_path, served):
    run = MadeRun(tmp_path / "run", NAMES)
    loss = falling(60)
    loss[[3, 4]] = [np.nan, np.inf]
    run.grow({"loss": loss}, stats={**healthy_stats(60), "mean": np.nan})
    page = served(run.directory)
    curve = page.ask("curves")[0]["curves"]["loss"]
    assert curve["mean"][3:5] == [None, None]
    assert (curve["nonfinite"], curve["first_nonfinite"]) == (2, 3)
    assert page.ask("tensor", name=NAMES[0])[0]["curves"]["mean"]["mean"][0] is None


def test_a_grid_and_the_records_behind_a_cell(tmp_path, served):
    plan = tr.plan(stages=2, microbatches=4)
    names = ["activation/a", "activation/b", "grad/a", "grad/b"]
    stages = {name: int(name.endswith("b")) for name in names}
    run = MadeRun(tmp_path / "run", names, plan=plan, stages=stages, microbatches=4)
    means = np.arange(3 * 4 * 4).reshape(12, 4)
    run.grow({"loss": np.ones(3)}, stats={"mean": means})
    page = served(run.directory)
    grid = page.ask("plan")[0]["grid"]
    assert grid["devices"] == [0, 1]
    assert [[tuple(unit) for unit in tick] for tick in grid["ticks"]] == [
        [tuple(unit) for unit in tick] for tick in plan.ticks
    ]
    (record,) = page.ask("cell", runs="0", kind="F", stage=1, microbatch=2)["records"]
    assert (record["name"], record["step"], record["mean"]) == (
        "activation/b",
        2,
        float(means[10, 1]),
    )
    (record,) = page.ask("cell", runs="0", kind="B", stage=0, microbatch=3)["records"]
    assert (record["name"], record["mean"]) == ("grad/a", float(means[11, 2]))


@contextlib.contextmanager
def events(page):
    """The events that a page receives, as they arrive."""
    connection = http.client.HTTPConnection("127.0.0.1", page.port, timeout=120)
    connection.request("GET", f"/{page.token}/events")

    def events_in(answer):
        while True:
            line = answer.readline().decode()
            if line.startswith("data: "):
                yield json.loads(line.removeprefix("data: "))

    with contextlib.closing(connection), connection.getresponse() as answer:
        assert answer.getheader("content-type").startswith("text/event-stream")
        yield events_in(answer)


def test_events_say_which_run_has_grown(tmp_path, served):
    runs = [MadeRun(tmp_path / name, NAMES) for name in "ab"]
    page = served(*(run.directory for run in runs))
    with events(page) as stream:
        first = next(stream)
        runs[1].grow({"loss": falling(10)}, stats=healthy_stats(10))
        second = next(stream)
    assert second[0] == first[0]
    assert second[1] > first[1]
    assert page.ask("overview")["runs"][1]["steps"] == 10


# -- runs that cannot be read -------------------------------------------------------------------


def test_a_missing_directory_is_refused_at_once(tmp_path):
    with pytest.raises(RunError, match="There is no run directory at '.*nowhere'"):
        serve([tmp_path / "nowhere"])
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="A run is a directory. '.*file' is a file"):
        serve([tmp_path / "file"])


def damaged(directory, how):
    if how == "foreign":
        (directory / "run.json").write_text('{"a": "run of something else"}')
    elif how == "newer":
        (directory / "run.json").write_text('{"format": 99}')
    elif how == "no arrays":
        shutil.rmtree(directory / "history")
    elif how == "half-written":
        (directory / "zarr.json").write_text((directory / "zarr.json").read_text()[:50])
    elif how == "truncated":
        for chunk in (directory / "records").rglob("c.*"):
            chunk.unlink()
    elif how == "empty":
        shutil.rmtree(directory)
        directory.mkdir()


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("foreign", "The file run.json of '.*' is damaged"),
        ("newer", "has format 99"),
        ("no arrays", "is damaged: history"),
        ("half-written", "is damaged: zarr.json"),
        ("truncated", "is truncated: the chunk"),
        ("empty", "holds no run: it is empty"),
    ],
)
def test_a_run_that_cannot_be_read_says_why_and_others_are_shown(tmp_path, made, served, how, text):
    bad = shutil.copytree(made.directory, tmp_path / "bad")
    damaged(bad, how)
    page = served(bad, made.directory)
    assert page.ask("overview")["runs"][1]["steps"] == 200
    said = []
    for question in ("curves", "findings", "about", "layers", "tensor", "plan"):
        one, other = page.ask(question, name=NAMES[0])
        said.append(one["problem"] + " ".join(one.get("problems", [])))
        said += [finding["text"] for finding in one.get("findings", [])]
        assert other["problem"] == ""
    assert any(re.search(text, sentence) for sentence in said), said


WRONG = (None, -1, 10**15, "x", [], {}, 1.5, ["a", "b"], {"a": 1})


@pytest.mark.filterwarnings("ignore")
def test_any_wrong_description_is_answered_with_json(tmp_path):
    """Whatever the files of a run say: every question has an answer, or a sentence."""
    plan = tr.plan(stages=2, microbatches=4)
    run = MadeRun(tmp_path / "run", NAMES[:3], NAMES[:1], plan=plan, microbatches=4)
    counts = np.ones((12, 1, 258), np.int32)
    run.grow({"loss": np.ones(3)}, stats=healthy_stats(12, NAMES[:3]), histograms=counts)
    files = sorted([run.directory / "run.json", *run.directory.rglob("zarr.json")])
    plain = {file: file.read_text() for file in files}
    cases = [
        (file, path, new)
        for file, text in plain.items()
        for path in places(json.loads(text))
        for new in WRONG
    ]
    query = {"runs": "0", "name": NAMES[0], "stage": "0", "microbatch": "0"}
    problems = 0
    for file, path, new in random.Random(1).sample(cases, 80):
        file.write_text(changed(plain[file], path, new))
        answers = Answers([FollowedRun(run.directory)])
        for question in QUESTIONS:
            try:
                text = as_json(getattr(answers, question)(query))
            except tr.TailraceError as error:
                text = str(error)
            problems += "damaged" in text or "truncated" in text
        with contextlib.suppress(tr.TailraceError):
            write_report(run.directory)
        pictured(FollowedRun(run.directory), 80)
        file.write_text(plain[file])
    assert problems > 30


def test_a_run_that_begins_later_is_shown_then(tmp_path, served):
    directory = tmp_path / "later"
    directory.mkdir()
    page = served(directory)
    assert "it is empty" in page.ask("overview")["runs"][0]["problem"]
    run = MadeRun(directory, NAMES)
    run.grow({"loss": falling(10)}, stats=healthy_stats(10))
    with events(page) as stream:
        next(stream)
    assert page.ask("overview")["runs"][0]["steps"] == 10


def test_a_run_that_is_described_anew_is_there_all_the_time(made, monkeypatch):
    """Requests are answered in other threads while one of them opens it again."""
    following, there = FollowedRun(made.directory), []
    before = following.run

    def opening(directory):
        there.append(following.readable())
        return tr.open_run(directory)

    monkeypatch.setattr(followed, "open_run", opening)
    described = made.directory / "run.json"
    described.write_text(described.read_text() + "\n")
    assert following.look()
    assert there == [before]
    assert not following.problem
    assert following.run is not before


# -- the command --------------------------------------------------------------------------------


def names_on(page):
    return [run["name"] for run in page.ask("overview")["runs"]]


def test_a_folder_is_all_its_runs_also_those_that_begin_later(tmp_path, served):
    (tmp_path / "folder" / "other").mkdir(parents=True)
    page = served(tmp_path / "folder", tmp_path / "folder")
    assert names_on(page) == ["folder"]
    with events(page) as stream:
        versions = next(stream)
        MadeRun(tmp_path / "folder" / "b", NAMES)
        assert next(stream) != versions  # it has the place of the folder, and another version
        assert names_on(page) == ["b"]
        MadeRun(tmp_path / "folder" / "a", NAMES)
        assert len(next(stream)) == 2
    assert names_on(page) == ["b", "a"]
    MadeRun(tmp_path / "folder" / "c", NAMES)
    assert names_on(page) == ["b", "a", "c"], "also where nobody listens"
    again = served(tmp_path / "folder" / "c", tmp_path / "folder")
    assert names_on(again) == ["c", "a", "b"], "each of them once"


def test_any_number_of_runs_is_served_and_a_chart_has_a_limit(tmp_path, served):
    for number in range(40):
        MadeRun(tmp_path / f"{number:02}", NAMES[:1])
    page = served(tmp_path)
    assert len(names_on(page)) == 40
    assert len(page.ask("curves", runs=",".join(map(str, range(5, 37))))) == 32
    for query in ("runs=" + ",".join(map(str, range(33))), ""):
        status, _, body = page.get(f"/{page.token}/api/curves?{query}")
        assert status == 400
        assert b"A chart shows at most 32 runs, and" in body


LARGE = "9" * 5000
ODD = [
    *("", "0", "-1", "1e3", "²", "٣", LARGE, f"-{LARGE}", "0." + LARGE, "NaN", "true", "none"),
    *("," * 3000, "0," * 3000, "%00", "a%00b", "%ff%fe", "%ud800", "%", "+", "../" * 500, "\\"),
    *("*" * 3000, "?" * 3000, "[" * 1500, "[a-" * 500, "**/" * 900 + "x", "(a+)+$", "😀"),
    *("x" * 30000, "a+" * 3000, "<script>", "{}", "%7B%22a%22%3A1%7D", "'+OR+1=1+--"),
]
"""Values of a query."""

PARAMETERS = ("runs", "first", "last", "name", "search", "recorded", "measure", "select", "stage")

REQUESTS = [
    "GET /TOKEN/static/{0}.js HTTP/1.1",
    "GET /TOKEN/static/a%00.js HTTP/1.1",
    "GET /TOKEN/static/%ff.js HTTP/1.1",
    "GET /TOKEN/api/{0} HTTP/1.1",
    "GET /TOKEN/api/overview?{0} HTTP/1.1",
    "GET /TOKEN/events/more HTTP/1.1",
    "HEAD /TOKEN/events HTTP/1.1",
    "HEAD /TOKEN/api/overview HTTP/1.1",
    "OPTIONS /TOKEN/api/overview HTTP/1.1",
    "TRACE / HTTP/1.1",
    "GET /TOKEN//api//overview HTTP/1.1",
    "GET http://127.0.0.1/TOKEN/api/overview HTTP/1.1",
    "GET * HTTP/1.1",
    "GET /?token=TOKEN&token=x HTTP/1.1",
    "GET /TOKEN/events HTTP/1.1\r\nUpgrade: websocket\r\nConnection: Upgrade"
    "\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==",
    "GET /TOKEN/api/overview HTTP/1.1\r\nContent-Length: {1}",
    "GET /TOKEN/api/overview HTTP/1.1\r\nRange: bytes=0-{1}",
    "GET /TOKEN/api/overview HTTP/1.1\r\nX: {0}",
    "GET /{1}/api/overview HTTP/1.1",
    "{0}",
    "GET",
]
"""Requests with {0}, some text, and {1}, some number."""


def test_any_query_has_an_answer_or_a_sentence(made, served):
    """Each parameter with each value, in every question; a chance draws some of all."""
    page = served(made.directory)
    chance, cases = random.Random(7), list(itertools.product(QUESTIONS, PARAMETERS, ODD))
    statuses = set()
    for question, parameter, value in chance.sample(cases, 400):
        more = "&stage=0&microbatch=0" if question == "cell" and chance.random() < 0.7 else ""
        path = f"/{page.token}/api/{question}?{parameter}={quote(value, safe='%,*+')}{more}"
        status, _, body = page.get(path)
        statuses.add(status)
        assert status in (200, 400), (path[:200], status)
        found = json.loads(body)
        if status == 400:
            assert found["problem"].endswith("."), found
            assert len(found["problem"]) < 400
    assert statuses == {200, 400}


def test_any_request_is_answered(made, served):
    page = served(made.directory)
    for request in REQUESTS:
        line = request.replace("TOKEN", page.token)
        line = line.replace("{0}", "x" * 5000).replace("{1}", LARGE)
        with socket.create_connection(("127.0.0.1", page.port), timeout=LIMIT_S) as plain:
            plain.sendall(f"{line}\r\nHost: 127.0.0.1\r\n\r\n".encode())
            answer = plain.recv(100)
        assert re.match(rb"HTTP/1\.1 (200|4\d\d) ", answer), (request, answer)
    assert page.ask("overview"), "and the page still answers"


def test_repeated_runs_are_answered_for_once(made, served):
    page = served(made.directory)
    assert len(page.ask("curves", runs=",".join(["0"] * 3000))) == 1
    assert page.ask("curves", runs=f"{LARGE},0,7,x")[0]["run"] == 0
    status, _, body = page.get(f"/{page.token}/api/curves?first={LARGE}")
    assert status == 400
    assert json.loads(body) == {"problem": f"first is at most {10**15}. Received: 5000 digits."}


def test_a_port_that_is_taken_or_none(made):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(OptionError, match=f"Nothing can listen at port {port}: "):
            serve([made.directory], port)
    with pytest.raises(OptionError, match="--port is a number from 0 to 65535"):
        serve([made.directory], 99999)


@pytest.mark.parametrize("package", ["uvicorn", "starlette.applications"])
def test_without_its_packages_the_page_says_how_to_install_them(made, package, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingDependency, match=r"pip install 'tailrace\[view\]'"):
        serve([made.directory])
    assert main(["view", str(made.directory)]) == 2
    assert capsys.readouterr().err.startswith("tailrace view: The page needs the package ")


@pytest.mark.parametrize("moment", ["announced", "making its loop"])
def test_an_interrupt_before_it_serves_ends_it_without_a_word(made, moment, monkeypatch, capfd):
    new_event_loop = asyncio.events.new_event_loop

    def interrupted(*_):
        signal.raise_signal(signal.SIGINT)
        return new_event_loop()

    def announce(text):
        if moment == "announced":
            signal.raise_signal(signal.SIGINT)

    class Handler(logging.Handler):
        """As that of absl, which closes the file it writes to."""

        closed = False

        def close(self):
            self.closed = True
            super().close()

    handler = Handler()
    if moment == "making its loop":
        monkeypatch.setattr(asyncio.events, "new_event_loop", interrupted)
    before = signal.getsignal(signal.SIGINT)
    try:
        serve([made.directory], announce=announce)
    except KeyboardInterrupt:  # which would end the tests
        pytest.fail("the interrupt was raised")
    assert signal.getsignal(signal.SIGINT) is before
    assert capfd.readouterr() == ("", "")
    assert not handler.closed


@pytest.mark.parametrize("asked", [True, False])
def test_the_command_prints_its_address_and_ends_by_an_interrupt(made, asked):
    with subprocess.Popen(
        [sys.executable, "-m", "tailrace", "view", str(made.directory)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as running:
        line = running.stdout.readline()
        assert re.match(r"Look at http://127\.0\.0\.1:\d+/\?token=\S+ ", line)
        if asked:  # it serves; otherwise the interrupt may come before it does
            assert Served(line.split()[2]).ask("overview")
        running.send_signal(signal.SIGINT)
        _, err = running.communicate(timeout=LIMIT_S)
    assert running.returncode == 0, err
    assert err == ""
