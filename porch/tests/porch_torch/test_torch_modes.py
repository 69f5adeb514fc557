"""Which values a call returns, in which shape and order."""

import numpy as np
import pytest
import torch
from small_modules import line
from torch import nn

import tailrace as tr
import tailrace.torch as tt


class Echo(nn.Module):
    """Returns its input, seven times as wide, and a loss that is the first entry."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(()))

    def forward(self, x):
        loss = tt.identity_loss(x[0] + 0 * self.w, reduction="none")
        return {"wide": x[:, None].repeat(1, 7), "loss": loss}


def run(mode, period=1, iterations=4, microbatches=3, replicas=2, batch=2):
    model = tt.training_model(
        Echo(),
        None,
        device_iterations=iterations,
        accumulation=microbatches,
        replicas=replicas,
        output_mode=mode,
        output_return_period=period,
    )
    rows = torch.arange(iterations * microbatches * replicas * batch, dtype=torch.float32)
    return rows, model(rows)


def test_all_returns_rows_in_the_order_of_the_input():
    rows, out = run("all")
    assert out["wide"].shape == (48, 7)
    assert torch.equal(out["wide"][:, 0], rows)
    assert torch.equal(out["loss"], rows[::2])


def test_final_returns_the_last_microbatch_of_each_replica():
    rows, out = run("final")
    assert out["wide"].shape == (4, 7)
    assert torch.equal(out["wide"][:, 0], rows[-4:])
    assert torch.equal(out["loss"], rows[[-4, -2]])


def test_sum_is_over_microbatches_not_over_rows_or_replicas():
    rows, out = run("sum")
    assert out["wide"].shape == (4, 7)
    assert torch.equal(out["wide"][:, 0], rows.reshape(12, 4).sum(0))
    assert out["loss"].shape == (2,)


@pytest.mark.parametrize("mode", ["every_n", tr.every(2)])
def test_every_n_counts_microbatches(mode):
    rows, out = run(mode, 2)
    assert out["wide"].shape == (24, 7)
    kept = rows.reshape(12, 4)[1::2]
    assert torch.equal(out["wide"][:, 0], kept.reshape(-1))
    assert torch.equal(out["loss"], kept[:, ::2].reshape(-1))


@pytest.mark.parametrize(("mode", "shape"), [("all", (10,)), ("final", ()), ("sum", ())])
def test_one_copy_keeps_its_shape(mode, shape):
    _, out = run(mode, iterations=10, microbatches=1, replicas=1)
    assert out["loss"].shape == shape
    assert out["wide"].shape == ((20, 7) if mode == "all" else (2, 7))


def test_every_n_without_accumulation():
    rows, out = run("every_n", 5, iterations=10, microbatches=1, replicas=1)
    assert torch.equal(out["loss"], rows.reshape(10, 2)[[4, 9], 0])


@pytest.mark.parametrize(
    ("period", "message"),
    [(5, "Return period must be <="), (3, "Return period must be a factor of")],
)
def test_periods_that_do_not_fit(period, message):
    with pytest.raises(tr.TailraceError, match=message):
        run("every_n", period)


def test_modes_are_checked():
    with pytest.raises(tr.TailraceError, match="An output mode is one of 'all', 'final'"):
        run("first")
    with pytest.raises(AssertionError, match="EveryN anchor must have output_return_period"):
        run("every_n", 0)


def test_defaults_are_final_for_training_and_all_for_inference():
    module = nn.Linear(6, 20)
    assert tt.inference_model(module, device_iterations=10)(torch.ones(10, 1, 5, 6)).shape == (
        10,
        1,
        5,
        20,
    )
    assert run("default")[1]["wide"].shape == (4, 7)


def test_inference_modes():
    x, _ = line(10)
    module = nn.Linear(3, 2)
    expected = module(x).detach().numpy()
    for mode, rows in (("final", expected[-1:]), ("sum", expected.sum(0, keepdims=True))):
        model = tt.inference_model(module, device_iterations=10, output_mode=mode)
        np.testing.assert_allclose(model(x).numpy(), rows, rtol=2e-5, atol=2e-6)
    every = tt.inference_model(module, device_iterations=10, output_mode=tr.every(5))
    np.testing.assert_allclose(every(x).numpy(), expected[[4, 9]], rtol=2e-5, atol=2e-6)
    shared = tt.inference_model(module, device_iterations=5, replicas=2)
    np.testing.assert_allclose(shared(x).numpy(), expected, rtol=2e-5, atol=2e-6)


class Pick(nn.Module):
    def forward(self, x):
        return x.argmax(1), x > 0, x.long(), 3, None, "text"


def test_outputs_of_all_kinds():
    x = torch.tensor([[1.0, -2.0, 3.0], [4.0, 0.0, -1.0]])
    index, positive, whole, number, nothing, text = tt.inference_model(Pick())(x)
    assert torch.equal(index, torch.tensor([2, 0], dtype=torch.int32))
    assert torch.equal(positive, x > 0)
    assert torch.equal(whole, x.int())
    assert (number, nothing, text) == (3, None, "text")
