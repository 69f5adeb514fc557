"""What XLA chose by timing is kept with checkpoints on a GPU, and only there."""

import contextvars

import pytest

from tailrace.base.messages import forget_notes
from tailrace.feeds.background import Worker
from tailrace.program.compiling.kernel_choices import FILE, choices_in, compiled


class Lowered:
    """Stands for a lowered program: compiling writes the choices where XLA is asked to."""

    def __init__(self, known=True):
        self.known, self.options = known, []

    def compile(self, options):
        self.options.append(options)
        if not self.known and options:
            raise ValueError("No such compile option")
        if path := (options or {}).get("xla_gpu_dump_autotune_results_to"):
            with open(path, "w") as file:
                file.write("version: 3\n")
        return "program"


def test_choices_are_written_whole_and_read_again(tmp_path):
    lowered = Lowered()
    with choices_in(tmp_path, write=True):
        assert compiled(lowered, {"a": "b"}, "gpu") == "program"
    (options,) = lowered.options
    assert options["a"] == "b"
    assert "xla_gpu_load_autotune_results_from" not in options, "a file that is missing is an error"
    assert [path.name for path in tmp_path.iterdir()] == [FILE]
    again = Lowered()
    with choices_in(tmp_path):
        compiled(again, None, "gpu")
    assert again.options == [{"xla_gpu_load_autotune_results_from": str(tmp_path / FILE)}]


def test_elsewhere_nothing_is_kept(tmp_path):
    lowered = Lowered()
    with choices_in(tmp_path, write=True):
        compiled(lowered, None, "cpu")
    compiled(lowered, None, "gpu")
    with choices_in(None):
        compiled(lowered, None, "gpu")
    assert lowered.options == [None, None, None]
    assert not list(tmp_path.iterdir())


def test_an_xla_that_cannot_goes_on_without(tmp_path, caplog):
    forget_notes()
    lowered = Lowered(known=False)
    with choices_in(tmp_path, write=True):
        assert compiled(lowered, None, "gpu") == "program"
    assert "choices of kernels are not kept" in caplog.text


def test_other_errors_are_raised(tmp_path):
    class Full(Lowered):
        def compile(self, options):
            super().compile(options)
            raise RuntimeError("RESOURCE_EXHAUSTED")

    with choices_in(tmp_path, write=True), pytest.raises(RuntimeError, match="RESOURCE"):
        compiled(Full(), None, "gpu")
    assert not list(tmp_path.iterdir()), "what it had written is gone"


def test_two_threads_do_not_write_one_file(tmp_path):
    lowered = Lowered()
    with choices_in(tmp_path, write=True):
        compiled(lowered, None, "gpu")
        worker = Worker("tailrace-compile")
        context = contextvars.copy_context()
        worker.submit(context.run, compiled, lowered, None, "gpu").result(60)
        worker.stop()
    paths = {options["xla_gpu_dump_autotune_results_to"] for options in lowered.options}
    assert len(paths) == 2
    assert [path.name for path in tmp_path.iterdir()] == [FILE]
