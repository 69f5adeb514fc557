"""What changes between calls takes effect: optimizers, freezing, shared weights, modules."""

import copy

import numpy as np
import pytest
import torch
from small_modules import Regression, line, program_of, seeded
from torch import nn

import tailrace as tr
import tailrace.torch as tt
from oracles import assert_bits_equal, assert_close
from tailrace.compat import poptorch


class Two(nn.Module):
    """Two layers, of which one may be frozen."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 1)

    def forward(self, x, y):
        out = self.b(torch.tanh(self.a(x)))
        return out, nn.functional.mse_loss(out, y)


def weights(module):
    return {name: value.detach().numpy().copy() for name, value in module.state_dict().items()}


def plainly(module, optimizer, *batch):
    optimizer.zero_grad()
    module(*batch)[1].backward()
    optimizer.step()


def states(optimizer):
    found = optimizer.state_dict()["state"]
    return {
        f"{number}/{slot}": np.asarray(value)
        for number, slots in found.items()
        for slot, value in slots.items()
        if value is not None
    }


def pair(make=Two, kind=torch.optim.SGD, **options):
    """(module, optimizer) twice, with the same weights."""
    module, reference = seeded(make)
    return (module, kind(module.parameters(), **options)), (
        reference,
        kind(reference.parameters(), **options),
    )


def freeze(flag):
    return lambda module, _: module.a.requires_grad_(flag)


def group(**values):
    return lambda _, optimizer: optimizer.param_groups[0].update(values)


CHANGES = {
    "weight decay": ({"lr": 0.1}, [group(weight_decay=0.1), group(weight_decay=0.0)]),
    "momentum": ({"lr": 0.1}, [group(momentum=0.9), group(momentum=0.0), group(momentum=0.9)]),
    "nesterov": ({"lr": 0.1, "momentum": 0.9}, [group(nesterov=True)]),
    "maximize": ({"lr": 0.01}, [group(maximize=True)]),
    "freezing": ({"lr": 0.1, "momentum": 0.9}, [freeze(False), freeze(True)]),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name, marks=[pytest.mark.exhaustive] if name in ("nesterov", "maximize") else []
        )
        for name in CHANGES
    ],
)
def test_changes_of_sgd_take_effect(name):
    options, changes = CHANGES[name]
    ours, theirs = pair(**options)
    model = tt.training_model(*ours)
    for number, change in enumerate([lambda *_: None, *changes]):
        change(*ours)
        change(*theirs)
        for step in range(2):
            batch = line(8, seed=10 * number + step)
            model(*batch)
            plainly(*theirs, *batch)
    assert_close(weights(ours[0]), weights(theirs[0]))
    assert_close(states(ours[1]), states(theirs[1]))


@pytest.mark.parametrize("wrapped_first", [False, True])
def test_parameters_that_come_later_count_their_own_steps(wrapped_first):
    (module, _), (reference, _) = pair()
    ours = module, torch.optim.Adam(module.b.parameters(), lr=0.01)
    theirs = reference, torch.optim.Adam(reference.b.parameters(), lr=0.01)
    model = tt.training_model(*ours)
    for call in range(4):
        if call == (0 if wrapped_first else 2):
            for inner, optimizer in (ours, theirs):
                optimizer.add_param_group({"params": list(inner.a.parameters()), "lr": 0.02})
        batch = line(8, seed=call)
        model(*batch)
        plainly(*theirs, *batch)
    assert_close(weights(module), weights(reference))
    assert_close(states(ours[1]), states(theirs[1]))


def test_thawed_parameters_go_on_from_their_state(tmp_path):
    ours, theirs = pair(kind=torch.optim.AdamW, lr=0.02, weight_decay=0.1)
    model = tt.training_model(*ours)
    for call in range(6):
        if call in (2, 4):
            for module, optimizer in (ours, theirs):
                module.a.requires_grad_(call == 4)
                optimizer.zero_grad(set_to_none=True)
        batch = line(8, seed=call)
        model(*batch)
        plainly(*theirs, *batch)
    assert_close(weights(ours[0]), weights(theirs[0]))
    assert_close(states(ours[1]), states(theirs[1]))
    model.save(tmp_path / "m.npz")
    again = seeded(Two)[0]
    other = tt.training_model(
        again, torch.optim.AdamW(again.parameters(), lr=0.02, weight_decay=0.1)
    )
    other.load(tmp_path / "m.npz")
    model(*line(8))
    other(*line(8))
    assert_bits_equal(again.a.weight.detach().numpy(), ours[0].a.weight.detach().numpy())


def test_nothing_is_compiled_again_without_a_change():
    (module, optimizer), _ = pair(kind=torch.optim.Adam, lr=0.1)
    model = tt.training_model(module, optimizer)
    model(*line(8))
    engine = program_of(model)
    optimizer.param_groups[0]["lr"] = 0.01
    model(*line(8))
    optimizer.state_dict()
    model.set_optimizer(optimizer)
    model(*line(8))
    assert program_of(model) is engine


def test_another_program_has_another_run_directory(tmp_path):
    (module, optimizer), _ = pair(lr=0.1)
    model = tt.training_model(module, optimizer, run_dir=tmp_path / "run")
    model(*line(8))
    optimizer.param_groups[0]["momentum"] = 0.9
    model(*line(8))
    model.destroy()
    first, second = tr.open_run(tmp_path / "run"), tr.open_run(tmp_path / "run-2")
    assert (first.history.first_step, second.history.first_step) == (0, 1)


def test_a_loaded_state_of_the_optimizer_takes_effect():
    ours, theirs = pair(kind=torch.optim.Adam, lr=0.05)
    model = tt.training_model(*ours)
    model(*line(8))
    plainly(*theirs, *line(8))
    kept = copy.deepcopy(theirs[1].state_dict())
    for call in range(2):
        model(*line(8, seed=call))
        plainly(*theirs, *line(8, seed=call))
    for _, optimizer in (ours, theirs):
        optimizer.load_state_dict(copy.deepcopy(kept))
    _ = ours[0].a.weight  # weights come to the host, and the state that was loaded stays
    model(*line(8, seed=5))
    plainly(*theirs, *line(8, seed=5))
    assert_close(weights(ours[0]), weights(theirs[0]))
    assert_close(states(ours[1]), states(theirs[1]))


def test_a_new_optimizer_starts_from_its_loaded_state():
    ours, theirs = pair(kind=torch.optim.Adam, lr=0.05)
    model = tt.training_model(*ours)
    kept = None
    for call in range(3):
        model(*line(8, seed=call))
        plainly(*theirs, *line(8, seed=call))
        kept = kept or copy.deepcopy(theirs[1].state_dict())
    made = [torch.optim.Adam(module.parameters(), lr=0.05) for module, _ in (ours, theirs)]
    for optimizer in made:
        optimizer.load_state_dict(copy.deepcopy(kept))
    model.set_optimizer(made[0])
    model(*line(8, seed=5))
    plainly(theirs[0], made[1], *line(8, seed=5))
    assert_close(weights(ours[0]), weights(theirs[0]))
    assert_close(states(made[0]), states(made[1]))
    assert float(states(ours[1])["0/step"]) == 3  # what the one before had reached


def test_a_new_optimizer_without_state_goes_on():
    ours, theirs = pair(lr=0.05, momentum=0.9)
    model = tt.training_model(*ours)
    for call in range(2):
        model(*line(8, seed=call))
        plainly(*theirs, *line(8, seed=call))
    model.set_optimizer(
        torch.optim.SGD(ours[0].parameters(), lr=0.02, momentum=0.9, weight_decay=0.1)
    )
    theirs[1].param_groups[0].update(lr=0.02, weight_decay=0.1)
    model(*line(8, seed=5))
    plainly(*theirs, *line(8, seed=5))
    assert_close(weights(ours[0]), weights(theirs[0]))


def test_learning_rates_set_while_there_is_no_program():
    ours, theirs = pair(lr=0.05)
    model = tt.training_model(*ours)
    model(*line(8))
    plainly(*theirs, *line(8))
    model.eval()
    model.train()
    for _, optimizer in (ours, theirs):
        optimizer.param_groups[0]["lr"] = 0.3
    model(*line(8))
    plainly(*theirs, *line(8))
    assert_close(weights(ours[0]), weights(theirs[0]))


# -- shared weights -----------------------------------------------------------------------------


class OnShared(nn.Module):
    def __init__(self, shared, own, sign):
        super().__init__()
        self.shared, self.own, self.sign = shared, own, sign

    def forward(self, x, y):
        out = self.own(torch.tanh(self.shared(x)))
        return out, nn.functional.mse_loss(out, self.sign * y)


def shared_pair():
    # A bias in front of a normalisation has gradients of nothing but rounding.
    shared = nn.Sequential(nn.Linear(3, 4, bias=False), nn.BatchNorm1d(4))
    return nn.ModuleList([OnShared(shared, nn.Linear(4, 1), s) for s in (1, -1)])


def test_models_that_share_weights_take_turns():
    modules, plain = seeded(shared_pair)
    kinds = (torch.optim.Adam, torch.optim.SGD)
    models = [
        tt.training_model(m, k(m.parameters(), lr=0.05))
        for m, k in zip(modules, kinds, strict=True)
    ]
    optimizers = [k(m.parameters(), lr=0.05) for m, k in zip(plain, kinds, strict=True)]
    for call, turn in enumerate([0, 1, 0, 0, 1, 1, 0]):
        batch = line(8, seed=call)
        models[turn](*batch)
        plainly(plain[turn], optimizers[turn], *batch)
        if call == 3:  # reading in between changes nothing, through whichever module
            shared = modules[1].shared[0].weight.detach().numpy()
            assert_close(shared, plain[1].shared[0].weight.detach().numpy())
        if call == 4:
            models[0].copy_weights_to_host()
            models[0].eval()
            models[0].train()  # drops the program, keeps the weights
    for module, reference in zip(modules, plain, strict=True):
        assert_close(weights(module), weights(reference))


def test_inference_sees_what_any_of_them_has_trained():
    modules, _ = seeded(shared_pair)
    models = [tt.training_model(m, torch.optim.SGD(m.parameters(), lr=0.1)) for m in modules]
    inner, whole = tt.inference_model(modules[0].shared), tt.inference_model(modules[0])
    x, y = line(8)
    for model in (models[0], models[1], models[0]):
        inner(x), whole(x, y)
        model(x, y)
        found, (out, _) = inner(x), whole(x, y)
        buffers = copy.deepcopy(modules[0].shared)
        assert_close(found.numpy(), buffers(x).detach().numpy())
        assert_close(out.numpy(), copy.deepcopy(modules[0])(x, y)[0].detach().numpy())


def test_one_of_them_can_be_destroyed():
    modules, plain = seeded(shared_pair)
    models = [tt.training_model(m, torch.optim.SGD(m.parameters(), lr=0.1)) for m in modules]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in plain]
    for turn in (0, 1):
        models[turn](*line(8))
        plainly(plain[turn], optimizers[turn], *line(8))
    models[1].destroy()
    models[0](*line(8))
    plainly(plain[0], optimizers[0], *line(8))
    shared = modules[1].shared[0].weight.detach().numpy()
    assert_close(shared, plain[1].shared[0].weight.detach().numpy())
    models[0].destroy()
    assert type(modules[0].shared) is nn.Sequential


class Discriminating(nn.Module):
    def __init__(self, generator, discriminator):
        super().__init__()
        self.g, self.d = generator, discriminator

    def forward(self, noise, real):
        fake = self.g(noise).detach()
        made, seen = self.d(fake), self.d(real)
        judged = nn.functional.binary_cross_entropy_with_logits
        loss = judged(made, torch.zeros_like(made)) + judged(seen, torch.ones_like(seen))
        return fake, tt.identity_loss(loss, reduction="none")


class Generating(nn.Module):
    def __init__(self, generator, discriminator):
        super().__init__()
        self.g, self.d = generator, discriminator

    def forward(self, noise):
        out = self.d(self.g(noise))
        return out, nn.functional.binary_cross_entropy_with_logits(out, torch.ones_like(out))


def gan():
    return nn.ModuleList(
        [nn.Linear(2, 3), nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))]
    )


def test_a_gan_trains_like_pytorch():
    (g, d), (plain_g, plain_d) = (list(module) for module in seeded(gan))
    adam = torch.optim.Adam
    by_d = tt.training_model(Discriminating(g, d), adam(d.parameters(), lr=0.02))
    by_g = tt.training_model(Generating(g, d), adam(g.parameters(), lr=0.02))
    judge, forge = Discriminating(plain_g, plain_d), Generating(plain_g, plain_d)
    adam_d, adam_g = adam(plain_d.parameters(), lr=0.02), adam(plain_g.parameters(), lr=0.02)
    for call in range(3):
        generator = torch.Generator().manual_seed(call)
        noise = torch.randn(8, 2, generator=generator)
        real = torch.randn(8, 3, generator=generator) + 1
        by_d(noise, real)
        by_g(noise)
        plainly(judge, adam_d, noise, real)
        plainly(forge, adam_g, noise)
    for ours, theirs in ((g, plain_g), (d, plain_d)):
        assert_close(weights(ours), weights(theirs))


def test_two_models_with_one_optimizer():
    modules, plain = seeded(shared_pair)
    for both in (modules, plain):
        both[1].own = both[0].own
    kinds = [torch.optim.Adam(m[0].parameters(), lr=0.05) for m in (modules, plain)]
    models = [tt.training_model(module, kinds[0]) for module in modules]
    for call, turn in enumerate([0, 1, 1, 0, 1]):
        models[turn](*line(8, seed=call))
        plainly(plain[turn], kinds[1], *line(8, seed=call))
    assert_close(weights(modules), weights(plain))
    assert_close(states(kinds[0]), states(kinds[1]))


# -- weights and modules ------------------------------------------------------------------------


def test_weights_written_while_there_is_no_program_are_trained():
    ours, theirs = pair(lr=0.05)
    model = tt.training_model(*ours)
    model(*line(8))
    plainly(*theirs, *line(8))
    model.eval()
    model.train()
    for module, _ in (ours, theirs):
        with torch.no_grad():
            module.a.weight.fill_(0.5)
    model(*line(8))
    plainly(*theirs, *line(8))
    assert_close(weights(ours[0]), weights(theirs[0]))


def test_destroying_a_model_without_a_program_keeps_its_weights():
    ours, theirs = pair(lr=0.05)
    model = tt.training_model(*ours)
    model(*line(8))
    plainly(*theirs, *line(8))
    model.eval()
    model.destroy()
    assert_close(weights(ours[0]), weights(theirs[0]))


class PartlyUsed(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.never = nn.Linear(3, 1), nn.Linear(3, 1)
        self.behind, self.silent = nn.Linear(3, 1), nn.Linear(3, 1)
        self.rounded = nn.Parameter(torch.ones(1))

    def forward(self, x, y):
        out = self.used(x) + self.behind(x).detach() + self.rounded.round()
        with torch.no_grad():
            silent = self.silent(x)
        out = out + silent
        return out, nn.functional.mse_loss(out, y)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_what_the_loss_does_not_depend_on_stays(kind, tmp_path):
    ours, theirs = pair(PartlyUsed, kind, lr=0.1, weight_decay=0.3)
    model = tt.training_model(*ours, accumulation=2)
    for call in range(3):
        model(*line(8, seed=call))
        plainly(*theirs, *line(8, seed=call))
    assert_close(weights(ours[0]), weights(theirs[0]))
    assert_close(states(ours[1]), states(theirs[1]))
    model.save(tmp_path / "m.npz")
    model(*line(8))
    (module, optimizer), _ = pair(PartlyUsed, kind, lr=0.1, weight_decay=0.3)
    other = tt.training_model(module, optimizer, accumulation=2)
    other.load(tmp_path / "m.npz")
    other(*line(8))
    assert_bits_equal(module.used.weight.detach().numpy(), ours[0].used.weight.detach().numpy())


@pytest.mark.parametrize("told_first", [True, False])
def test_another_submodule_needs_another_optimizer(told_first):
    ours, theirs = pair(lr=0.05)
    model = tt.training_model(*ours)
    model(*line(8))
    plainly(*theirs, *line(8))
    for module in (ours[0], theirs[0]):
        torch.manual_seed(1)
        module.a = nn.Linear(3, 4)
    if not told_first:
        with pytest.raises(tr.TailraceError, match="Make it from module.parameters"):
            model(*line(8))
    model.set_optimizer(torch.optim.SGD(ours[0].parameters(), lr=0.05))
    again = torch.optim.SGD(theirs[0].parameters(), lr=0.05)
    model(*line(8))
    plainly(theirs[0], again, *line(8))
    assert_close(weights(ours[0]), weights(theirs[0]))


def test_a_destroyed_model_does_not_come_back_beside_another():
    (module, optimizer), _ = pair(lr=0.1)
    model = tt.training_model(module, optimizer)
    model(*line(8))
    model.destroy()
    tt.training_model(module, torch.optim.SGD(module.parameters(), lr=0.1))
    with pytest.raises(tr.TailraceError, match="already been wrapped"):
        model(*line(8))


def test_another_dtype_takes_effect():
    module, _ = seeded(Regression)
    model = tt.training_model(module, torch.optim.SGD(module.parameters(), lr=0.05))
    x, y = line(8)
    model(x, y)
    module.bfloat16()
    reference = copy.deepcopy(module)
    out, _ = model(x.bfloat16(), y.bfloat16())
    assert out.dtype == module.linear.weight.dtype == torch.bfloat16
    plainly(reference, torch.optim.SGD(reference.parameters(), lr=0.05), x.bfloat16(), y.bfloat16())
    found, expected = (m.linear.weight.detach().float() for m in (module, reference))
    assert torch.allclose(found, expected, 2e-2, 2e-2)


# -- what is refused when it is given -----------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ({"schedule": "z"}, "schedule is 'auto', 'grouped', 'interleaved', 'sequential'"),
        ({"recompute": "maybe"}, "recompute is False, True"),
        ({"output_return_period": -2}, "output_return_period must be a whole number >= 1: of"),
        ({"run_dir": 3}, "run_dir is the path of a directory"),
    ],
)
def test_options_without_effect_are_checked_too(option, text):
    with pytest.raises(tr.TailraceError, match=text):
        tt.training_model(Two(), **option)


@pytest.mark.parametrize("value", [-1, 0, "x", float("nan"), [1]])
def test_numbers_of_optimizers_are_checked(value):
    with pytest.raises(tr.TailraceError, match=r"greater than 0. Received: max_grad_norm="):
        tt.optim.SGD(Two().parameters(), max_grad_norm=value)
    with pytest.raises(tr.TailraceError, match=r"greater than 0. Received: loss_scaling="):
        tt.optim.Adam(Two().parameters(), loss_scaling=value)


def test_unknown_names_say_where_names_are():
    model = tt.training_model(Two(), observe="grad/nothing")
    with pytest.raises(tr.TailraceError, match=r"All names: model.tensor_names\(\), after comp"):
        model(*line(8))
    anchored = tt.inference_model(nn.Linear(3, 1))
    anchored.anchor_tensor("here", "nothing/like/it")
    with pytest.raises(tr.TailraceError, match=r"All names: model.tensor_names\(\), after comp"):
        anchored(line(8)[0])


def test_older_and_rarer_names_of_poptorch():
    assert issubclass(poptorch.RecoverableError, poptorch.Error)
    assert issubclass(poptorch.UnrecoverableError, poptorch.Error)
    assert not poptorch.ipuHardwareIsAvailable(2)
    assert poptorch.ipuHardwareVersion() == 0
    options = poptorch.Options().anchorMode(poptorch.AnchorMode.EveryN, 2)
    assert (options.output_mode, options.output_return_period) == (poptorch.OutputMode.EveryN, 2)
    mode = poptorch.OutputMode.All
    with pytest.raises(poptorch.Error, match="output_mode and anchor_mode"):
        options.anchorTensor("a", "b", output_mode=mode, anchor_mode=mode)
    with pytest.raises(poptorch.Error, match="anchor_return_period, which are the same"):
        options.anchorTensor("a", "b", output_return_period=1, anchor_return_period=1)
