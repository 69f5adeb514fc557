"""Under `torch.autocast` every operation has the dtype that PyTorch gives it."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tailrace.torch as tt
from tailrace.torch.tracing import autocast

UNARY = (
    *("exp", "log", "log1p", "expm1", "sinh", "acos", "reciprocal", "rsqrt", "sum", "prod", "norm"),
    *("sigmoid", "tanh", "relu", "sqrt", "mean", "var", "amax", "trace", "square"),
)

CASES = {
    **{f"torch.{name}": lambda a, b, name=name: getattr(torch, name)(a) for name in UNARY},
    **{f"x.{name}": lambda a, b, name=name: getattr(a, name)() for name in UNARY},
    "a @ b": lambda a, b: a @ b,
    "a ** 2": lambda a, b: a**2,
    "1 / a": lambda a, b: 1 / a,
    "a + wide": lambda a, b: a + b.float(),
    "cat": lambda a, b: torch.cat([a, b.float()]),
    "mm": lambda a, b: a.mm(b),
    "addmm": lambda a, b: torch.addmm(b, a, b),
    "bmm": lambda a, b: torch.bmm(a[None], b[None]),
    "mv": lambda a, b: torch.mv(a, b[0]),
    "dot": lambda a, b: torch.dot(a[0], b[0]),
    "einsum": lambda a, b: torch.einsum("ij,jk->ik", a, b),
    "multi_dot": lambda a, b: torch.linalg.multi_dot([a, b, a]),
    "tensordot": lambda a, b: torch.tensordot(a, b, 1),
    "linear": lambda a, b: F.linear(a, b),
    "conv1d": lambda a, b: F.conv1d(a[None], b[:, :, None]),
    "prelu": lambda a, b: F.prelu(a, b[0, :1]),
    "attention": lambda a, b: F.scaled_dot_product_attention(a[None], b[None], b[None]),
    "softmax": lambda a, b: F.softmax(a, 1),
    "log_softmax": lambda a, b: a.log_softmax(1),
    "cumsum": lambda a, b: a.cumsum(0),
    "layer_norm": lambda a, b: F.layer_norm(a, (4,)),
    "normalize": lambda a, b: F.normalize(a),
    "gelu": lambda a, b: F.gelu(a),
    "mse_loss": lambda a, b: F.mse_loss(a, b),
    "cross_entropy": lambda a, b: F.cross_entropy(a, torch.tensor([0, 1, 2, 3])),
    "huber_loss": lambda a, b: F.huber_loss(a, b),
    "cdist": lambda a, b: torch.cdist(a, b),
    "reflected": lambda a, b: F.pad(a[None], (1, 1), mode="reflect"),
    "padded": lambda a, b: F.pad(a[None], (1, 1)),
}


class Every(nn.Module):
    def forward(self, a, b):
        with torch.autocast("cpu", torch.bfloat16):
            return {
                f"{name} of {x.dtype}": function(x.abs(), y)
                for x, y in ((a, b), (a.bfloat16(), b.bfloat16()))
                for name, function in CASES.items()
            }


def test_every_operation_has_pytorchs_dtype():
    a, b = torch.rand(4, 4) * 0.8 + 0.1, torch.rand(4, 4)
    found, expected = tt.inference_model(Every())(a, b), Every()(a, b)
    assert {n: v.dtype for n, v in found.items()} == {n: v.dtype for n, v in expected.items()}
    for name, value in expected.items():
        torch.testing.assert_close(found[name].float(), value.float(), rtol=3e-2, atol=3e-2)


class Layers(nn.Module):
    """Layers that PyTorch composes of operations."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(4, 4, batch_first=True)
        self.attention = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return self.lstm(x)[0], self.attention(x)


def test_composed_layers_compute_in_16_bits():
    torch.manual_seed(0)
    module, x = Layers().eval(), torch.randn(2, 3, 4)
    found, expected = tt.inference_model(module)(x), module(x)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one.float(), other.detach().float(), rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_no_operation_is_in_both_lists(device):
    assert not autocast.NARROW[device] & autocast.WIDE[device]
    assert "softmax" in autocast.WIDE["cuda"] - autocast.WIDE["cpu"]
