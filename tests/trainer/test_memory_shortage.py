"""A device without enough memory: what took how much, what would help, and nothing is lost."""

import jax
import numpy as np
import optax
import pytest

import tailrace as tr
from oracles import assert_bits_equal
from tailrace.program.running.executable import Executable
from tailrace.trainer.collector import Collector

X = np.random.default_rng(0).normal(size=(24, 3000)).astype(np.float32)
EXHAUSTED = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 8.00GiB."


def trainer_of(**options):
    optimizer = optax.sgd(0.1, momentum=0.9)
    params = np.zeros((3000,), np.float32)
    return tr.Trainer(lambda w, x: ((x @ w - 1) ** 2).mean(), optimizer, params, **options)


@pytest.fixture
def failing(monkeypatch):
    """Executions fail as they do on a device that is full, for as long as the list is not empty."""
    left, plain = [], Executable.compile

    def compiled(self, *args):
        found = plain(self, *args)
        if not left or not self.segment.is_loop:
            return found

        def run(*_):
            left.pop()
            raise jax.errors.JaxRuntimeError(EXHAUSTED)

        return run

    monkeypatch.setattr(Executable, "compile", compiled)
    return left


@pytest.mark.parametrize("options", [{}, {"replicas": 2, "shard_optimizer_state": True}])
def test_the_trainer_is_as_before_the_step(failing, options):
    data = tr.batches(X, 2, shuffle=True, repeat=True)
    expected = trainer_of(steps_per_execution=2, **options)
    expected.fit(data, steps=4)
    found = trainer_of(steps_per_execution=2, **options)

    class Fill(tr.Callback):
        def on_execution_end(self, trainer, execution):
            failing.append(1)

    with pytest.raises(tr.errors.DeviceMemoryError) as caught:
        found.fit(data, steps=4, callbacks=[Fill()])
    text = str(caught.value)
    assert "does not have enough memory for an execution of 2 steps when 8.00GiB more were" in text
    assert "more were asked for" in text
    assert "parameters 12.0 kB" in text
    assert ("optimizer state 12.0 kB" in text) == (not options), "two replicas have half of it each"
    assert "smaller batches with more accumulation=" in text
    assert text.endswith("The trainer is as it was before this execution, at step 2.")
    assert found.step == 2
    assert isinstance(caught.value, MemoryError)
    first = trainer_of(steps_per_execution=2, **options)
    first.fit(data, steps=2)
    assert_bits_equal(found.state, first.state)
    found.fit(data, steps=2)  # there is room again
    assert found.step == 4


@pytest.mark.parametrize("guarded", [False, True])
def test_a_shortage_that_shows_after_the_dispatch(monkeypatch, guarded):
    """With a guard the state before an execution is kept; without, the execution consumed it."""
    data = tr.batches(X, 2, shuffle=True, repeat=True)
    observe = [tr.stop_on_nonfinite("loss")] if guarded else []
    found = trainer_of(steps_per_execution=2, observe=observe)
    first = trainer_of(steps_per_execution=2, observe=observe)
    first.fit(data, steps=2)
    plain = Collector.results

    def results(self, ticket, *args):
        if ticket.first_step == 2:
            raise jax.errors.JaxRuntimeError(EXHAUSTED)
        return plain(self, ticket, *args)

    monkeypatch.setattr(Collector, "results", results)
    with pytest.raises(tr.errors.DeviceMemoryError, match="8.00GiB more were asked for") as caught:
        found.fit(data, steps=10)
    assert "smaller batches with more accumulation=" in str(caught.value)
    assert found.step == 2
    assert len(found.history.loss) == 2
    if guarded:
        assert str(caught.value).endswith("as it was before this execution, at step 2.")
        assert_bits_equal(found.state, first.state)
        monkeypatch.undo()
        found.fit(data, steps=2)
        assert found.step == 4
    else:
        assert str(caught.value).endswith(
            "The state was lost with the execution: go back to a checkpoint."
        )


def test_options_in_use_are_not_advised(failing):
    trainer = trainer_of(replicas=2, shard_optimizer_state=True)
    failing.append(1)
    with pytest.raises(tr.errors.DeviceMemoryError, match="What would help: ") as caught:
        trainer.fit([X[:2]] * 2, epochs=1)
    assert "shard_optimizer_state=True" not in str(caught.value)


def test_other_errors_of_the_device_pass(monkeypatch):
    def failing(*_):
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")

    trainer = trainer_of()
    trainer.fit([X[:2]], epochs=1)
    monkeypatch.setattr(Executable, "compile", lambda self, *args: failing)
    with pytest.raises(jax.errors.JaxRuntimeError, match="something else"):
        trainer.fit([X[:2]], epochs=1)


def test_a_step_of_the_user_s_own_is_offered_no_options_that_it_lacks(failing):
    trainer = tr.Trainer.from_step(lambda w, x: (w + x.mean(), {"loss": x.mean()}), np.float32(0))
    failing.append(1)
    with pytest.raises(tr.errors.DeviceMemoryError) as caught:
        trainer.fit(tr.batches(X, 2), steps=2)
    text = str(caught.value)
    assert "smaller batches; jax.checkpoint around layers" in text
    assert "state 4 B" in text
    assert not any(word in text for word in ("accumulation", "precision", "offload", "parameters"))
