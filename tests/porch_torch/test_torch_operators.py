"""PyTorch's own operator samples: a few of them; `python -m benchmarks.torch_operators` has all."""

import importlib.util
from pathlib import Path

import pytest
import torch

PATH = Path(__file__).parents[2] / "benchmarks" / "torch_operators.py"

NAMES = {
    "__radd__": torch.bool,
    "addmm": torch.bfloat16,
    "cholesky": torch.float32,
    "cummax": torch.float32,
    "cumsum": torch.float16,
    "index_add": torch.int64,
    "kron": torch.bfloat16,
    "index_reduce (prod)": torch.float32,
    "linalg.lstsq": torch.float32,
    "matrix_exp": torch.float16,
    "nextafter": torch.float32,
    "nn.functional.adaptive_max_pool2d": torch.float32,
    "nn.functional.fractional_max_pool3d": torch.float32,
    "nn.functional.layer_norm": torch.float16,
    "nn.functional.max_unpool2d": torch.float32,
    "nn.functional.scaled_dot_product_attention": torch.float32,
    "polygamma (polygamma_n_1)": torch.float32,
    "quantile": torch.float32,
    "renorm": torch.bfloat16,
    "scatter_reduce (amin)": torch.int64,
    "sinc": torch.float16,
    "special.legendre_polynomial_p": torch.float32,
    "special.scaled_modified_bessel_k1": torch.float32,
    "special.shifted_chebyshev_polynomial_w": torch.int64,
    "special.spherical_bessel_j0": torch.float32,
    "sum": torch.int64,
    "where": torch.bool,
}


@pytest.fixture(scope="module")
def operators():
    spec = importlib.util.spec_from_file_location("torch_operators", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module, {module.full_name(op): op for op in module.operators()}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NAMES)
def test_samples(operators, name):
    module, found = operators
    rows = list(module.verdicts(found[name], NAMES[name], 1))
    assert rows
    assert [row for row in rows if row[1] != "right"] == []


@pytest.mark.filterwarnings("ignore")
def test_what_differs_is_found(operators):
    module, _ = operators
    one, other = ([torch.ones(2)], []), ([torch.tensor([1.0, 1.1])], [])
    assert "expected" in module.difference(other, one, lambda: one)
    assert "torch.float16, expected" in module.difference(([torch.ones(2).half()], []), one, None)
    assert "shape [1]" in module.difference(([torch.ones(1)], []), one, None)
    assert "1 gradients" in module.difference((one[0], one[0]), one, None)
    assert module.difference(one, one, lambda: one) == ""
    # What overflows in the dtype is infinite, also where PyTorch gets NaN on the way.
    nothing = ([torch.tensor([torch.nan]).half()], [])
    exact = ([torch.tensor([1e6], dtype=torch.float64)], [])
    for found, right in ((torch.inf, True), (6e4, False)):
        text = module.difference(([torch.tensor([found]).half()], []), nothing, lambda: exact)
        assert (text == "") is right
