"""Backward passes that a module brings itself are used; hooks on PyTorch's are refused."""

import pytest
import torch
from small_modules import cut, line, seeded, train_plainly, training
from torch import nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import tailrace as tr
import tailrace.torch as tt
from oracles import assert_close


class Around(nn.Module):
    """Two layers, and whatever a test puts between them."""

    def __init__(self, between):
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 1)
        self.scale = nn.Parameter(torch.linspace(0.5, 2, 4)[None])
        self.between = between

    def forward(self, x, y):
        out = self.second(self.between(self.first(x), self.scale))
        return out, functional.mse_loss(out, y)


def trains_as_plainly(between, steps=2):
    """Two microbatches a step, here and in plain PyTorch; all weights must agree."""
    model, module, reference = training(lambda: Around(between), accumulation=2)
    x, y = line(8)
    for _ in range(steps):
        model(x, y)
    model.copy_weights_to_host()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for _ in range(steps):
        train_plainly(reference, optimizer, cut((x, y), 2), 2)
    assert_close(values(module), values(reference))
    return module


def values(module):
    return {name: value.detach().numpy() for name, value in module.named_parameters()}


# -- backward passes of one's own ---------------------------------------------------------------


class Reverse(Function):
    @staticmethod
    def forward(ctx, x, strength):
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -ctx.strength * gradient, None


class Round(Function):
    @staticmethod
    def forward(x):
        return torch.round(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(inputs[0] - output)

    @staticmethod
    def backward(ctx, gradient):
        (error,) = ctx.saved_tensors
        assert ctx.needs_input_grad == (True,)
        return gradient * (1 - error**2)


class Mixed(Function):
    """Two inputs and two outputs that train, one that does not, and gradients that are not its own."""

    @staticmethod
    def forward(ctx, a, b, names):
        ctx.save_for_backward(a, b)
        ctx.kept = {"double": a * 2, "names": names}
        largest = a.argmax(1)
        near = a - b
        ctx.mark_non_differentiable(largest, near)
        return a * b, a + b, largest, near

    @staticmethod
    @once_differentiable
    def backward(ctx, product, total, *_):
        a, b = ctx.saved_tensors
        assert ctx.kept["names"] == ["a", "b"]
        return 3 * product * b + total * ctx.kept["double"], product * a + total, None


class Doubled(Function):
    """Changes its input in place, and takes a number from around it."""

    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, gradient):
        return 0.5 * gradient


reverse = Reverse.apply  # taken off its class before any model is made


def mixed(x, scale):
    product, total, largest, near = Mixed.apply(x, scale, ["a", "b"])
    return product + total * largest[:, None] + near


def doubled(x, scale):
    y = x * scale
    Doubled.apply(y)
    return y + scale


@pytest.mark.parametrize(
    "between",
    [
        lambda x, scale: Round.apply(4 * x) * scale,
        mixed,
        doubled,
        lambda x, scale: reverse(torch.tanh(reverse(x * scale, 2.0)), 0.25),
        lambda x, scale: torch.tanh(x) * reverse(scale, 1.0),
    ],
    ids=["round", "mixed", "in-place", "reverse", "broadcast"],
)
def test_a_function_keeps_its_own_backward(between):
    trains_as_plainly(between)


def test_what_backward_takes_from_around_it_counts():
    held = {}

    class Weighed(Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient * held["scale"] * torch.tensor([1.0, 2.0, 3.0, 4.0])

    def between(x, scale):
        held["scale"] = scale.detach()
        return Weighed.apply(x) * torch.tensor([1.0, 2.0, 3.0, 4.0])

    trains_as_plainly(between)


def test_a_function_is_put_back():
    plain = Function.apply.__func__, vars(Function.__mro__[1]).get("apply")
    trains_as_plainly(lambda x, scale: reverse(x, 1.0), steps=1)
    assert (Function.apply.__func__, vars(Function.__mro__[1]).get("apply")) == plain
    x = torch.ones(2, requires_grad=True)
    reverse(x, 3.0).sum().backward()
    assert x.grad.tolist() == [-3.0, -3.0]


class ForwardOnly(Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2


def test_a_function_without_backward_runs_but_does_not_train():
    between = lambda x, scale: ForwardOnly.apply(x)  # noqa: E731
    with pytest.raises(tr.TailraceError, match="trains defines backward. ForwardOnly does not"):
        trains_as_plainly(between)
    module, reference = seeded(lambda: Around(between))
    x, y = line(4)
    assert_close(tt.inference_model(module)(x, y)[0].numpy(), reference(x, y)[0].detach().numpy())


class OneTooFew(Function):
    @staticmethod
    def forward(ctx, x, scale):
        return x * scale

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Misshapen(OneTooFew):
    @staticmethod
    def backward(ctx, gradient):
        return gradient, gradient[:, :3]


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (OneTooFew, "OneTooFew.backward returns 1, and forward takes 2"),
        (Misshapen, "Misshapen.backward returns one of .4, 3. for argument 1, which is .1, 4."),
    ],
)
def test_gradients_that_do_not_fit(function, text):
    with pytest.raises(tr.TailraceError, match=text):
        trains_as_plainly(function.apply)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_just_run(reentrant):
    def between(x, scale):
        return checkpoint(lambda a, b: torch.tanh(a) * b, x, scale, use_reentrant=reentrant)

    trains_as_plainly(between)


# -- hooks --------------------------------------------------------------------------------------

HOOKS = {
    "register_full_backward_hook": lambda m: m.first.register_full_backward_hook(print),
    "register_full_backward_pre_hook": lambda m: m.first.register_full_backward_pre_hook(print),
    "register_backward_hook": lambda m: m.first.register_backward_hook(print),
    "register_hook": lambda m: m.first.weight.register_hook(print),
    "register_post_accumulate_grad_hook": lambda m: (
        m.first.weight.register_post_accumulate_grad_hook(print)
    ),
}


@pytest.mark.parametrize("name", HOOKS)
def test_hooks_of_the_backward_pass_are_refused(name):
    model, module, _ = training(lambda: Around(torch.mul))
    HOOKS[name](module)
    with pytest.raises(tr.TailraceError, match=f"'first.*has a hook of {name}, which would never"):
        model(*line(4))
    tt.inference_model(module)(*line(4))


def test_hooks_within_forward_are_refused():
    def hooked(x, scale):
        x.register_hook(print)
        return x * scale

    with pytest.raises(tr.TailraceError, match="calls register_hook on a tensor"):
        trains_as_plainly(hooked)
    tt.inference_model(Around(hooked))(*line(4))


def test_gradients_within_forward_are_refused():
    def penalised(x, scale):
        return torch.autograd.grad(x.sum(), scale)[0]

    with pytest.raises(tr.TailraceError, match="asks PyTorch for gradients"):
        trains_as_plainly(penalised)


def test_forward_hooks_go_on_working():
    def make():
        module = Around(torch.mul)
        module.first = nn.utils.parametrizations.weight_norm(module.first)
        module.second.register_forward_hook(lambda _module, _args, out: out * 2)
        return module

    model, module, reference = training(make)
    x, y = line(4)
    model(x, y)
    model.copy_weights_to_host()
    train_plainly(reference, torch.optim.SGD(reference.parameters(), lr=0.1), [(x, y)])
    assert_close(values(module), values(reference))
