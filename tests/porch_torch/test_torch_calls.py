"""What a model may be called with: signatures, containers, forms that must stay the same, options."""

import collections
import re

import pytest
import torch
from small_modules import Regression, digits, line, program_of, training
from torch import nn

import tailrace as tr
import tailrace.torch as tt

Pair = collections.namedtuple("Pair", "a b")


class Nest(nn.Module):
    def forward(self, x, *rest, scale=2, extra=None, **others):
        out = x * scale
        for one in rest:
            out = out + one
        if extra is not None:
            out = out + extra["t"] + extra["p"].a[0]
        for one in others.values():
            out = out - one
        return {"out": out, "pair": Pair(out + 1, [x, (out,)]), "k": 1}


def test_arguments_and_containers_keep_their_structure():
    model = tt.inference_model(Nest())
    one = torch.ones(2, 3)
    extra = {"t": one, "p": Pair([one], None)}
    out = model(one, one, one, scale=3, extra=extra, other=one)
    assert type(out) is dict
    assert type(out["pair"]) is Pair
    assert type(out["pair"].b) is list
    assert torch.equal(out["out"], torch.full((2, 3), 6.0))
    assert torch.equal(out["pair"].b[1][0], out["out"])
    assert out["k"] == 1


class Ordered(collections.OrderedDict):
    pass


def test_subclasses_of_dict_and_registered_types_come_back():
    class Box:
        def __init__(self, t):
            self.t = t

    class Parser:
        def yield_tensors(self, struct):
            yield struct.t

        def reconstruct(self, original, tensors):
            return Box(next(tensors))

    class Boxes(nn.Module):
        def forward(self, box):
            return Ordered(double=box.t * 2), Box(box.t + 1)

    tt.register_container(Box, Parser())
    try:
        ordered, box = tt.inference_model(Boxes())(Box(torch.ones(3)))
    finally:
        tt.register_container(Box, None)
    assert type(ordered) is Ordered
    assert torch.equal(ordered["double"], torch.full((3,), 2.0))
    assert torch.equal(box.t, torch.full((3,), 2.0))


class Takes(nn.Module):
    def forward(self, x, y=None, u=5):
        values = y.values() if isinstance(y, dict) else (y or ())
        return x + sum(values) + u


T = torch.ones(2, 3)


@pytest.mark.parametrize(
    ("first", "then", "message"),
    [
        ((T,), (torch.ones(4, 3),), "Shape mismatch for x: expected torch.Size([2, 3]) but got "),
        (
            (T,),
            (T.double(),),
            "Data type mismatch for x: expected torch.float32 but got torch.float64",
        ),
        (
            (T,),
            (T, (T,)),
            "Number of positional arguments mismatch: expected 1 arguments but got 2",
        ),
        ((T, (T,)), (T, (T, T)), "Length mismatch for y: expected 1 but got 2"),
        ((T, (T,)), (T, [T]), "Type mismatch for y: expected tuple but got list"),
        ((T, (T,)), (T, (1,)), "Type mismatch for y.0: expected a tensor but got int"),
        ((T, {"a": T}), (T, {"b": T}), "Keys mismatch for y: Unexpected arguments: b; Missing arg"),
        ((T, None, 5), (T, None, 3), "Value mismatch for u: expected 5 but got 3"),
    ],
)
def test_later_calls_must_match(first, then, message):
    model = tt.inference_model(Takes())
    model(*first)
    with pytest.raises(tr.TailraceError, match=re.escape(message)) as caught:
        model(*then)
    assert "destroy()" in str(caught.value)
    model(*first)
    model.destroy()
    model(*then)


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((), {}, "Mandatory parameter x missing"),
        ((T, None, 1, 2), {}, "Too many arguments provided"),
        ((T,), {"z": T}, "z is not a valid parameter"),
        ((T,), {"x": T}, "multiple values for argument 'x'"),
    ],
)
def test_arguments_must_fit_forward(args, kwargs, message):
    with pytest.raises(tr.TailraceError, match=message):
        tt.inference_model(Takes())(*args, **kwargs)


def test_keywords_in_any_order_are_the_same_call():
    model = tt.inference_model(Takes())
    out = model(x=T, y=(T,), u=2)
    assert torch.equal(model(u=2, y=(T,), x=T), out)
    assert torch.equal(model(T, (T,), u=2), out)


def test_the_batch_must_divide():
    model, *_ = training(device_iterations=3)
    with pytest.raises(AssertionError, match="Invalid batch dimension: In the input x"):
        model(*digits(10))
    model(*digits(12))
    with pytest.raises(AssertionError, match="must be a multiple of device_iterations x replicas"):
        model(*digits(11))
    with pytest.raises(tr.TailraceError, match="Zero-sized tensors are unsupported"):
        tt.inference_model(Takes())(torch.ones(0, 3))


def test_a_training_model_compiles_again_after_destroy():
    model, module, _ = training()
    model(*digits(4))
    with pytest.raises(tr.TailraceError, match="Shape mismatch for x"):
        model(*digits(6))
    weight = module.fc1.weight.detach().clone()
    model.destroy()
    assert torch.equal(module.fc1.weight, weight)
    assert not model.is_compiled
    with pytest.raises(tr.TailraceError, match="Model has not been compiled or has been destroyed"):
        model.copy_weights_to_host()
    out, _ = model(*digits(6))
    assert out.shape == (6, 4)
    assert not torch.equal(module.fc1.weight, weight)


def test_compiling_runs_nothing():
    model, module, reference = training()
    model.compile(*digits(4))
    assert model.is_compiled
    assert torch.equal(module.fc1.weight, reference.fc1.weight)
    model(*digits(4))
    assert not torch.equal(module.fc1.weight, reference.fc1.weight)


@pytest.mark.parametrize("options", [{}, {"output_mode": tr.every(2), "device_iterations": 2}])
def test_what_was_compiled_is_what_runs(options):
    model, *_ = training(**options)
    model.compile(*digits(8))
    model(*digits(8))
    assert len(program_of(model).engine.runner.executables) == 1


def test_odd_inputs_are_taken_care_of(caplog):
    model, *_ = training(Regression)
    x, y = line(4)
    plain = model(x, y)[0]
    model.load_state_dict(training(Regression)[2].state_dict())
    strided = x.t().contiguous().t()
    assert not strided.is_contiguous()
    assert torch.equal(model(strided.requires_grad_(), y)[0], plain)


def test_inputs_changed_in_place_are_changed_for_the_caller():
    class Changes(nn.Module):
        def forward(self, x, other):
            x[:, 0].add_(1)
            other = other + 1
            return x * 2, other.add_(1)

    given = torch.randn(6, 2)
    plain, kept = given.clone(), torch.ones(6, 1)
    expected = Changes()(plain, kept)
    model = tt.inference_model(Changes(), device_iterations=3)
    found = model(given, kept)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(given, plain)
    assert torch.equal(kept, torch.ones(6, 1))
    model(given, kept)
    Changes()(plain, kept)
    assert torch.equal(given, plain)


def test_inputs_changed_in_place_by_training():
    class Changes(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x):
            x.mul_(2)
            return tt.identity_loss((x * self.scale).square(), reduction="mean")

    x = torch.arange(4.0)
    model = tt.training_model(Changes(), accumulation=2, device_iterations=2)
    model(x)
    assert torch.equal(x, 2 * torch.arange(4.0))


def test_dicts_are_read_by_key():
    class Named(nn.Module):
        def forward(self, batch, **more):
            return batch["a"] - batch["b"], more["p"] - more["q"]

    one, two = torch.ones(2), torch.full((2,), 2.0)
    model = tt.inference_model(Named())
    for _ in range(2):
        first = model({"a": one, "b": two}, p=one, q=two)
        again = model({"b": two, "a": one}, q=two, p=one)
        assert torch.equal(first[0], again[0])
        assert torch.equal(first[1], again[1])
        assert torch.equal(again[0], one - two)


def test_models_without_inputs():
    class Constant(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.full((2,), 3.0))

        def forward(self, scale=2):
            return tt.identity_loss((self.weight * scale).square(), reduction="sum")

    module = Constant()
    assert float(tt.inference_model(module)()) == 72
    model = tt.training_model(
        module, torch.optim.SGD(module.parameters(), 0.01), device_iterations=3
    )
    before = float(model())
    assert float(model()) < before
    reference, rate = torch.full((2,), 3.0), 0.01
    for _ in range(6):
        reference = reference - rate * 8 * reference
    assert torch.allclose(module.weight, reference)


def test_inference_that_changes_buffers_gives_them_back():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x):
            self.seen += x.sum()
            return x + self.seen

    module, reference = Counts(), Counts()
    model = tt.inference_model(module)
    for _ in range(2):
        assert torch.equal(model(torch.ones(3)), reference(torch.ones(3)))
        assert torch.equal(module.seen, reference.seen)


def test_parameters_are_parameters_inside_of_forward():
    class Regularised(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)
            self.b.requires_grad_(False)

        def forward(self, x):
            own = [p for p in self.parameters() if isinstance(p, nn.Parameter) and p.requires_grad]
            assert len(own) == 2
            assert self.get_parameter("a.weight") is own[0]
            out = self.b(self.a(x))
            assert out.requires_grad
            assert not x.requires_grad
            with torch.no_grad():
                assert not self.a(x).requires_grad
            loss = out.square().mean() + sum(p.square().sum() for p in own)
            return tt.identity_loss(loss, reduction="none")

    torch.manual_seed(0)
    module = Regularised()
    x = torch.randn(3, 2)
    expected = module(x)
    model = tt.training_model(module, torch.optim.SGD(module.parameters(), 0.1))
    assert torch.allclose(model(x), expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device_iterations": 0}, "device_iterations must be a whole number >= 1"),
        ({"replicas": True}, "replicas must be a whole number >= 1"),
        ({"accumulation": 0}, "at least one microbatch"),
        ({"reduction": "median"}, "A reduction of gradients is one of"),
        ({"precision": "low"}, "precision is one of"),
        ({"seed": "x"}, "seed must be a whole number"),
        ({"execution": "phased"}, "execution is 'pipelined' or 'sharded'"),
        ({"iterations": 3}, "There is no option 'iterations'"),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises(tr.TailraceError, match=message):
        tt.training_model(Regression(), None, **options)


def test_inference_has_no_accumulation():
    with pytest.raises(tr.TailraceError, match="There is no accumulation in inference"):
        tt.inference_model(nn.Linear(1, 1), accumulation=2)
    with pytest.raises(tr.TailraceError, match="wraps a torch.nn.Module. Received: function"):
        tt.inference_model(lambda x: x)


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 3), self.Branch())

    class Branch(nn.Module):
        def forward(self, x):
            return x if x.sum() > 0 else -x

    def forward(self, x):
        return self.inner(x)


def test_what_cannot_be_traced_is_named():
    with pytest.raises(
        tr.TailraceError, match="Python cannot branch.*module 'inner.1' of Branches"
    ):
        tt.inference_model(Branches())(torch.ones(2, 3))

    class Odd(nn.Module):
        def forward(self, x):
            return torch.special.airy_ai(x)

    with pytest.raises(tr.TailraceError, match="An operation in forward of Odd cannot run"):
        tt.inference_model(Odd())(torch.eye(3))
