"""Layers and losses of PyTorch, one by one: forward and gradient equal PyTorch's own."""

import copy
import pathlib
import re

import jax
import numpy as np
import pytest
import torch
from coverage_cases import LAYERS, LOSSES, REFUSED

import tailrace as tr
import tailrace.torch as tt
from oracles import assert_close
from tailrace.torch.calls.arrays import array_of
from tailrace.torch.calls.containers import flatten
from tailrace.torch.tracing.forward import weights_of
from tailrace.torch.tracing.module_function import ModuleFunction, training_modes

CASES = {**LAYERS, **LOSSES}
SLOW = ("Transformer", "TransformerDecoderLayer", "LSTM (bidirectional)", "RNN", "ConvTranspose3d")
"""Variants of others, that take long."""


def total(leaves, xp):
    """One number from all float outputs, each entry with a weight of its own."""
    return sum(
        (
            value
            * xp(
                np.cos(np.arange(value.size if xp is np.asarray else value.numel()))
                .astype(np.float32)
                .reshape(value.shape)
            )
        ).sum()
        for value in leaves
    )


def plainly(name, module, inputs):
    inputs = [x.clone().requires_grad_(x.is_floating_point()) for x in inputs]
    if name in LOSSES and len(inputs) == 2:
        inputs[1].requires_grad_(False)
    leaves = [value for _, value in flatten(module(*inputs)) if torch.is_tensor(value)]
    total([v for v in leaves if v.is_floating_point()], torch.as_tensor).backward()
    grads = {name: p.grad for name, p in module.named_parameters()}
    grads.update({f"input {i}": x.grad for i, x in enumerate(inputs) if x.is_floating_point()})
    arrays = {name: g.numpy() for name, g in grads.items() if g is not None}
    return [v.detach().numpy() for v in leaves], arrays


def on_device(module, inputs):
    function = ModuleFunction(module, training_modes(module))
    params, buffers = (jax.tree.map(jax.numpy.asarray, tree) for tree in weights_of(module))
    arrays = [array_of(x) for x in inputs]
    floating = {f"input {i}": a for i, a in enumerate(arrays) if a.dtype.kind == "f"}

    def run(wanted):
        values = [wanted.get(f"input {i}", a) for i, a in enumerate(arrays)]
        ran = function(
            {name: wanted[name] for name in params},
            buffers,
            lambda wrap: (tuple(wrap(jax.numpy.asarray(v)) for v in values), {}),
            jax.random.key(0),
        )
        leaves = [value for _, value in ran.leaves]
        weighed = [v for v in leaves if v.dtype.kind == "f"]
        with jax.numpy_dtype_promotion("standard"):
            return total(weighed, np.asarray), leaves

    grads, leaves = jax.jit(jax.grad(run, has_aux=True))({**params, **floating})
    return leaves, grads


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.exhaustive] if name in SLOW else [])
        for name in CASES
        if name not in REFUSED
    ],
)
def test_forward_and_gradient(name):
    make, inputs = CASES[name]
    torch.manual_seed(0)
    module, given = make(), inputs()
    expected, expected_grads = plainly(name, copy.deepcopy(module), given)
    found, grads = on_device(module, given)
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert_close(np.asarray(a), b)
    assert_close({k: np.asarray(grads[k]) for k in expected_grads}, expected_grads)


class ClassLosses(torch.nn.Module):
    """Losses of classes, with every option; rows, images, and a single row."""

    def forward(self, rows, images, row, classes, pixels, one):
        weight = torch.tensor([1.0, 2.0, 0.5, 4.0])
        options = [
            *({"reduction": how} for how in ("none", "sum", "mean")),
            {"weight": weight},
            {"weight": weight, "ignore_index": 2, "reduction": "none"},
            {"weight": weight, "ignore_index": 2},
            {"ignore_index": 1},
            {"size_average": False},
            {"reduce": False},
        ]
        nll, entropy = torch.nn.functional.nll_loss, torch.nn.functional.cross_entropy
        return [
            loss(values, targets, **given)
            for loss in (nll, entropy)
            for values, targets in ((rows, classes), (images, pixels), (row, one))
            for given in options
        ]


@pytest.mark.filterwarnings("ignore:size_average and reduce args")
def test_losses_of_classes():
    torch.manual_seed(0)
    values = [torch.randn(5, 4), torch.randn(2, 4, 3, 2), torch.randn(4)]
    classes = [torch.tensor([0, 3, 2, 1, 2]), torch.randint(0, 4, (2, 3, 2)), torch.tensor(3)]
    expected, expected_grads = plainly("", ClassLosses(), [*values, *classes])
    found, grads = on_device(ClassLosses(), [*values, *classes])
    assert len(found) == len(expected) == 54
    for a, b in zip(found, expected, strict=True):
        assert_close(np.asarray(a), b)
    assert_close({k: np.asarray(grads[k]) for k in expected_grads}, expected_grads)


@pytest.mark.parametrize("wrong", [4, -1])
def test_a_class_that_there_is_not_is_no_number(wrong):
    class Loss(torch.nn.Module):
        def forward(self, x, y):
            return torch.nn.functional.cross_entropy(x, y, reduction="none")

    found = tt.inference_model(Loss())(torch.zeros(3, 4), torch.tensor([0, wrong, -100]))
    assert_close(found.numpy(), np.array([np.log(4), np.nan, 0], np.float32))


X = torch.zeros(3, 4)


@pytest.mark.parametrize(
    ("loss", "given", "sentence"),
    [
        ("cross_entropy", (X, torch.tensor([[0], [1], [2]])), "multi-target not supported"),
        ("nll_loss", (X, torch.tensor([[0], [1], [2]])), "multi-target not supported"),
        ("cross_entropy", (X, torch.eye(4)[:3].long()), "Expected floating point type for target"),
        ("cross_entropy", (X, torch.tensor([1])), r"match target batch_size \(1\)"),
        ("nll_loss", (X, torch.zeros(3)), "(?i)dtype|type"),
        (
            "nll_loss",
            (X, torch.tensor([0, 1, 2]), torch.ones(1)),
            "weight tensor should be defined",
        ),
        ("nll_loss", (X, torch.tensor([0, 1, 2]), None, None, -100, None, "avg"), "avg is not a"),
    ],
)
def test_targets_that_do_not_fit_are_refused_as_by_torch(loss, given, sentence):
    class Loss(torch.nn.Module):
        def forward(self, *given):
            return getattr(torch.nn.functional, loss)(*given, *others)

    tensors = [part for part in given[:3] if isinstance(part, torch.Tensor)]
    others = given[len(tensors) :]
    with pytest.raises(tr.TailraceError, match=sentence):
        on_device(Loss(), tensors)


@pytest.mark.parametrize("classes", [200, 256, 300])
def test_classes_of_one_byte(classes):
    class Loss(torch.nn.Module):
        def forward(self, x, y, row):
            nll = torch.nn.functional.nll_loss
            return nll(x, y, reduction="none"), nll(row, y[:1])

    torch.manual_seed(0)
    given = [
        torch.randn(3, classes),
        torch.tensor([1, 156, 199], dtype=torch.uint8),
        torch.randn(classes),
    ]
    for a, b in zip(on_device(Loss(), given)[0], Loss()(*given), strict=True):
        assert_close(np.asarray(a), b.numpy())


def test_a_guard_finds_the_row_whose_class_there_is_not():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.dense = torch.nn.Linear(4, 2)

        def forward(self, x, y):
            return torch.nn.functional.cross_entropy(self.dense(x), y)

    model = tt.training_model(Model(), device_iterations=2, observe=[tr.stop_on_nonfinite()])
    found = "'select_n' in 'cross_entropy' at .*test_torch_coverage.py.*first in row 1"
    with pytest.raises(tr.TailraceError, match=f"step 1.*{found}"):
        model(torch.ones(6, 4), torch.tensor([0, 1, 0, 1, 7, 1]))


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name):
    make, inputs = CASES[name]
    with pytest.raises(tr.TailraceError, match=REFUSED[name]):
        tt.inference_model(make())(*inputs())


def test_the_guide_lists_what_is_tested():
    guide = pathlib.Path(__file__).parents[2] / "docs" / "guides" / "pytorch.md"
    text = guide.read_text(encoding="utf-8")
    cells = {cell.strip() for line in text.splitlines() for cell in re.split(r"[|,]", line)}
    for name in CASES:
        for part in name.split(", "):
            assert part in cells or f"- {name}: " in text, name
