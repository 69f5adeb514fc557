"""Values of PyTorch tensors that the device cannot hold are refused."""

import pytest

torch = pytest.importorskip("torch")

import tailrace.torch as tt  # noqa: E402
from tailrace.errors import TailraceError  # noqa: E402


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(2, 1)

    def forward(self, x, y):
        return self.linear(x).mean() * y.float().mean()


@pytest.mark.parametrize(
    ("dtype", "value", "text"),
    [(torch.int64, 2**40 + 5, "1099511627781"), (torch.float64, 1e300, r"1e\+300")],
)
def test_data_that_does_not_fit(dtype, value, text):
    model = tt.inference_model(Model())
    y = torch.ones(8, dtype=dtype)
    model(torch.ones(8, 2), y)
    y[5] = value
    with pytest.raises(TailraceError, match=f"Received: {text}"):
        model(torch.ones(8, 2), y)
