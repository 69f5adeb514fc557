"""Operations at the points where formulas break, and those that PyTorch composes: as PyTorch's own."""

import inspect
import re

import jax
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from small_modules import Call
from torch import nn

import tailrace as tr
import tailrace.torch as tt
from oracles import assert_close
from tailrace.torch.calls.arrays import array_of
from tailrace.torch.torchax.ops.layers import normalised
from tailrace.torch.tracing.module_function import ModuleFunction, training_modes


def ours(function, *given):
    """What a function returns, and the gradient of its weighed sum."""
    module = Call(function)
    run = ModuleFunction(module, training_modes(module))
    arrays = [jax.numpy.asarray(array_of(x)) for x in given]
    floating = [i for i, x in enumerate(given) if x.is_floating_point()]

    def total(some):
        values = list(arrays)
        for i, value in zip(floating, some, strict=True):
            values[i] = value
        fill = lambda wrap: (tuple(map(wrap, values)), {})  # noqa: E731
        out = run({}, {}, fill, jax.random.key(0)).leaves[0][1]
        with jax.numpy_dtype_promotion("standard"):
            return (out * np.cos(np.arange(out.size)).reshape(out.shape)).sum(), out

    grads, out = jax.jit(jax.grad(total, has_aux=True))([arrays[i] for i in floating])
    return np.asarray(out), [np.asarray(grad) for grad in grads]


def gradient_of(x):
    return torch.zeros_like(x) if x.grad is None else x.grad


def plainly(function, *given):
    """The same of PyTorch alone."""
    given = [x.clone().requires_grad_(x.is_floating_point()) for x in given]
    out = function(*(x.clone() for x in given))
    weights = torch.as_tensor(np.cos(np.arange(out.numel())).astype(np.float32))
    (out * weights.reshape(out.shape)).sum().backward()
    return out.detach().numpy(), [gradient_of(x).numpy() for x in given if x.is_floating_point()]


def compare(function, *given):
    found, grads = ours(function, *given)
    expected, expected_grads = plainly(function, *given)
    assert_close(found, expected)
    assert_close(grads, expected_grads)


FAR = torch.tensor([-200.0, -100, -3, -1, -0.5, 0, 0.5, 1, 3, 6, 30, 89, 100, 200])

ELEMENTWISE = {
    "softplus": F.softplus,
    "softplus, beta": lambda x: F.softplus(x, 10.0, 15.0),
    "elu": F.elu,
    "elu in place": lambda x: F.elu(x, 0.3, inplace=True) + x,
    "celu": lambda x: F.celu(x, 0.3),
    "celu in place": lambda x: F.celu_(x) + x,
    "selu": F.selu,
    "selu in place": lambda x: F.selu(x, inplace=True) + x,
    "mish": F.mish,
    "mish in place": lambda x: F.mish(x, inplace=True) + x,
    "logsigmoid": F.logsigmoid,
    "leaky_relu": F.leaky_relu,
    "relu6": F.relu6,
    "hardtanh": F.hardtanh,
    "hardsigmoid": F.hardsigmoid,
    "hardswish": F.hardswish,
    "clamp": lambda x: x.clamp(-1, 3),
    "clamp by a tensor": lambda x: torch.clamp(x, min=torch.zeros_like(x)),
    "clamp_min": lambda x: x.clamp_min(-1.0).clamp_max(3.0),
    "abs": torch.abs,
    "l1_loss": lambda x: F.l1_loss(x, torch.tensor(1.0).expand(14), reduction="none"),
    "entropy of 0": lambda x: F.binary_cross_entropy(x.sigmoid(), torch.zeros_like(x)),
    "entropy of 1": lambda x: F.binary_cross_entropy(x.sigmoid(), torch.ones_like(x)),
    "entropy, weighed": lambda x: F.binary_cross_entropy(
        x.sigmoid(), torch.full_like(x, 0.3), torch.full_like(x, 2.0), reduction="none"
    ),
    "sinc": torch.sinc,
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_gradients_far_out_and_at_corners(name):
    compare(ELEMENTWISE[name], FAR)


@pytest.mark.parametrize("function", [torch.remainder, lambda x, y: y.__rmod__(x)])
def test_quotients_of_remainders_are_whole_numbers(function):
    """Also where a quotient in floats is rounded to a whole number, or to below one."""
    generator = torch.Generator().manual_seed(0)
    divisors = torch.randn(64, generator=generator) * torch.tensor([[1.0], [1e3], [1e-3]])
    multiples = divisors * torch.arange(1.0, 65)
    below = torch.nextafter(multiples, torch.zeros(()))
    for x in (multiples, below, -multiples, -below):
        compare(function, x, divisors)


@pytest.mark.parametrize("towards", [torch.zeros_like(FAR), FAR.flip(0)])
def test_neighbours_of_numbers(towards):
    found, grads = ours(torch.nextafter, FAR, towards)
    np.testing.assert_array_equal(found, torch.nextafter(FAR, towards).numpy())
    try:
        _, expected = plainly(torch.nextafter, FAR, towards)
    except NotImplementedError:  # PyTorch differentiates it since 2.12
        return
    assert_close(grads, expected)


@pytest.mark.parametrize("reduce", ["add", "multiply"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int32])
def test_a_number_is_scattered(reduce, dtype):
    x = torch.arange(12).reshape(4, 3).to(dtype)
    places = torch.tensor([[0, 1, 2], [1, 0, 2]])

    def scattered(x, places):
        written = x.clone()
        written.scatter_(1, places, 3, reduce=reduce)
        return x.scatter(-2, places, 2, reduce=reduce), written

    found, expected = tt.inference_model(Call(scattered))(x, places), scattered(x, places)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


def test_factors_of_scattered_products():
    """None, one and several of the factors of an entry are 0."""
    index = torch.tensor([0, 0, 1, 1, 2, 2, 3, 4])
    source = torch.tensor([2.0, 3, 0, 4, 0, 0, 5, 0])
    start = torch.tensor([1.0, 2, 3, 0, 0, 6])
    for included in (True, False):
        compare(
            lambda x, y, included=included: x.scatter_reduce(
                0, index, y, "prod", include_self=included
            ),
            start,
            source,
        )


ROWS = torch.tensor([[1.0, 2, 3], [0, 0, 0], [1, 2, 3], [4, -5, 6], [2, 2, 2]])
BITS = torch.tensor([0.1, 0.2, 0.3])

OF_ROWS = {
    **{f"norm {p}": lambda x, p=p: x.norm(p, 1) for p in (0.5, 1, 2, 3, float("inf"))},
    "norm of all": lambda x: (x * 0).norm() + torch.linalg.vector_norm(x) + torch.norm(x[1]),
    "linalg.norm": lambda x: torch.linalg.norm(x, dim=1),
    "std": lambda x: x.std(1) + x.std() + x[1].std(),
    "std, biased": lambda x: torch.std(x, dim=1, correction=0, keepdim=True),
    "std_mean": lambda x: torch.cat(torch.std_mean(x, 1)),
    **{f"cdist {p}": lambda x, p=p: torch.cdist(x, x, p=p) for p in (1.0, 2.0, 3.0, float("inf"))},
    "cdist of others": lambda x: torch.cdist(x, x[:2] + 0.5),
    "pdist": F.pdist,
    "dist": lambda x: torch.dist(x, x.detach()),
    "cosine_similarity": lambda x: F.cosine_similarity(x, torch.ones_like(x)),
    "max": lambda x: x.max(1).values + x.min(1).values,
    "mean, dtype": lambda x: x.mean(1, dtype=torch.float32),
    "take_along_dim": lambda x: torch.take_along_dim(x, (x + BITS).argsort(1), 1),
    "take_along_dim, one": lambda x: x.take_along_dim(x.argmax(1, keepdim=True), dim=1),
    "take_along_dim, flat": lambda x: torch.take_along_dim(x, torch.tensor([3, 0])),
}


@pytest.mark.parametrize("name", OF_ROWS)
def test_gradients_of_equal_and_empty_rows(name):
    compare(OF_ROWS[name], ROWS)


def test_normalizing_a_row_of_zeros():
    found, (grad,) = ours(F.normalize, ROWS)
    expected, (expected_grad,) = plainly(F.normalize, ROWS)
    assert_close(found, expected)
    assert_close(
        grad / np.abs(grad).max(1, keepdims=True),
        expected_grad / np.abs(grad).max(1, keepdims=True),
    )


# -- matrices -------------------------------------------------------------------------------------

DETERMINANTS = {"linalg.det": torch.linalg.det, "det": torch.det, "method": torch.Tensor.det}


@pytest.mark.parametrize("name", DETERMINANTS)
def test_determinants_of_matrices_without_rows_are_1(name):
    def both(a, b, c):
        found = [DETERMINANTS[name](x).reshape(-1) for x in (a, b, c)]
        return torch.cat(found)

    compare(both, torch.randn(2, 3, 3), torch.randn(0, 0), torch.randn(2, 0, 0))


@pytest.mark.parametrize("driver", [None, "gels", "gelsy"])
def test_least_squares(driver):
    a, b = torch.randn(2, 5, 3), torch.randn(2, 5, 2)

    def solved(a, b):
        found = torch.linalg.lstsq(a, b, driver=driver)
        return torch.cat([part.float().reshape(-1) for part in found])

    # Whatever PyTorch gives the gradient of: the solution alone has one in each of the drivers.
    assert_close(ours(solved, a, b)[0], solved(a, b).numpy())
    compare(lambda a, b: torch.linalg.lstsq(a, b, driver=driver).solution, a, b)
    compare(lambda a, b: torch.linalg.lstsq(a, b, driver=driver)[0], a, b[..., 0])


def test_least_squares_whose_residuals_depend_on_values_are_refused():
    with pytest.raises(tr.TailraceError, match="driver='gelsd' cannot run on the device"):
        ours(lambda a, b: torch.linalg.lstsq(a, b, driver="gelsd")[0], torch.eye(3, 2), ROWS[:3])


def test_gradients_of_long_products_in_16_bits_are_summed_in_32():
    a, b = torch.randn(2, 2).half(), torch.randn(64, 64).half()
    found, (grad, _) = ours(torch.kron, a, b)
    # The gradient of a result in 16 bits has 16 bits, too; the products with it are summed in 32.
    weights = torch.as_tensor(np.cos(np.arange(found.size))).reshape(found.shape).half().double()
    a, b = a.double().requires_grad_(), b.double()
    (torch.kron(a, b) * weights).sum().backward()
    assert_close(grad, a.grad.half().numpy())


# -- attention and convolutions -------------------------------------------------------------------

torch.manual_seed(0)
QUERY, KEY, VALUE = torch.randn(2, 2, 4, 3), torch.randn(2, 2, 5, 3), torch.randn(2, 2, 5, 6)
OPEN = torch.rand(2, 1, 4, 5) > 0.4
OPEN[:, :, 1] = False
OPEN[0, :, 3] = False


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_rows_that_attend_to_nothing_are_0(kind):
    mask = OPEN if kind == "bool" else torch.where(OPEN, 0.5, -torch.inf)
    compare(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, mask), QUERY, KEY, VALUE)
    found, _ = ours(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, mask), QUERY, KEY, VALUE
    )
    assert not found[:, :, 1].any()


def test_a_sentence_that_is_all_padding():
    layer = nn.MultiheadAttention(6, 2, batch_first=True)
    padding = torch.tensor([[False] * 5, [True] * 5])
    compare(
        lambda x: layer(x, x, x, key_padding_mask=padding, need_weights=False)[0],
        torch.randn(2, 5, 6),
    )


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("dims", [1, 2])
def test_transposed_convolutions_in_groups(dims, groups):
    convolve = (F.conv_transpose1d, F.conv_transpose2d)[dims - 1]
    x, bias = torch.randn(2, 4, *(4, 3)[:dims]), torch.randn(8)
    weight = torch.randn(4, 8 // groups, *(3, 2)[:dims])
    compare(lambda x, w, b: convolve(x, w, b, 2, 1, 1, groups), x, weight, bias)


# -- random numbers -------------------------------------------------------------------------------

DRAWN = {
    "exponential_": lambda x: x.exponential_(2.0),
    "cauchy_": lambda x: x.cauchy_(1.0, 2.0),
    "geometric_": lambda x: x.geometric_(0.3),
    "log_normal_": lambda x: x.log_normal_(0.5, 0.3),
    "normal_": lambda x: x.normal_(3.0, 0.1),
    "random_": lambda x: x.random_(3, 9),
    "normal, tensor and number": lambda x: torch.normal(x + 5, 0.1),
    "normal, number and tensor": lambda x: torch.normal(5.0, x + 0.1),
    "normal, tensors": lambda x: torch.normal(x + 5, x + 0.1),
    "normal, numbers": lambda x: torch.normal(2.0, 3.0, (4000,)) + x,
    "gumbel_softmax": lambda x: F.gumbel_softmax(x.view(-1, 2) + torch.tensor([0.0, 1]), dim=1)[
        :, 0
    ],
    "a part of a tensor": lambda x: x[:2000].normal_(1.0, 0.5),
    "a new tensor": lambda x: x.new_empty(4000).exponential_().log(),
}


@pytest.mark.parametrize("name", DRAWN)
def test_distributions(name):
    draw = DRAWN[name]
    module = Call(draw)
    run = ModuleFunction(module, training_modes(module))
    fill = lambda wrap: ((wrap(jax.numpy.zeros(4000)),), {})  # noqa: E731
    function = jax.jit(lambda key: run({}, {}, fill, key).leaves[0][1])
    found, again, other = (np.asarray(function(jax.random.key(seed))) for seed in (0, 0, 1))
    expected = torch.cat([draw(torch.zeros(4000)) for _ in range(4)]).numpy()
    assert found.shape == draw(torch.zeros(4000)).shape
    assert np.array_equal(found, again)
    assert not np.array_equal(found, other)
    low, middle, high = np.quantile(expected, [0.25, 0.5, 0.75])
    for part, limit in zip((0.25, 0.5, 0.75), (low, middle, high), strict=True):
        assert abs(np.quantile(found, part) - limit) <= 0.15 * (high - low)


def test_draws_are_new_in_each_step():
    class Noise(nn.Module):
        def forward(self, x):
            return torch.empty_like(x).exponential_()

    out = tt.inference_model(Noise(), device_iterations=3)(torch.zeros(6, 2))
    assert len(set(out.flatten().tolist())) == 12


# -- layers with state, and options ---------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False])
def test_instance_norm_with_running_statistics(training):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.InstanceNorm1d(3, affine=True, track_running_stats=True)

        def forward(self, x):
            return F.mse_loss(self.norm(x), torch.zeros_like(x))

    torch.manual_seed(0)
    x, model, plain = torch.randn(4, 3, 5) * 2 + 1, Model(), Model()
    model.train(training)
    plain.train(training)
    if training:
        tt.training_model(model, torch.optim.SGD(model.parameters(), 0.1))(x)
        optimizer = torch.optim.SGD(plain.parameters(), 0.1)
        plain(x).backward()
        optimizer.step()
    else:
        assert_close(tt.inference_model(model)(x).numpy(), plain(x).detach().numpy())
    for name, value in plain.norm.named_parameters():
        assert_close(
            dict(model.norm.named_parameters())[name].detach().numpy(), value.detach().numpy()
        )
    for name in ("running_mean", "running_var"):
        assert_close(getattr(model.norm, name).numpy(), getattr(plain.norm, name).numpy())


@pytest.mark.parametrize("padding", [None, 1, -1])
def test_embeddings_scale_gradients_by_how_often_a_row_is_used(padding):
    index = torch.tensor([[0, 1, 1], [2, 1, 0]])
    compare(lambda w: F.embedding(index, w, padding, scale_grad_by_freq=True), torch.randn(4, 2))


def test_embeddings_with_a_largest_norm_are_refused():
    model = tt.inference_model(nn.Embedding(4, 2, max_norm=1.0))
    with pytest.raises(tr.TailraceError, match=re.escape("no max_norm here")) as caught:
        model(torch.tensor([0, 2]))
    assert "Received: max_norm=1.0. Normalise the rows" in str(caught.value)


SOFT = {
    "F.softmax": lambda x: F.softmax(x, -1, dtype=torch.float32),
    "F.log_softmax": lambda x: F.log_softmax(x, -1, dtype=torch.float32),
    "F.softmin": lambda x: F.softmin(x, -1, dtype=torch.float32),
    "torch.softmax": lambda x: torch.softmax(x, 1, torch.float32),
    "Tensor.softmax": lambda x: x.softmax(dim=1, dtype=torch.float32),
    "Tensor.log_softmax": lambda x: x.log_softmax(1, torch.float32),
}


@pytest.mark.parametrize("name", SOFT)
def test_softmax_in_another_dtype(name):
    found, _ = ours(lambda x: SOFT[name](x.half()), ROWS)
    assert found.dtype == np.float32
    assert_close(found, SOFT[name](ROWS.half()).numpy())


def test_memory_formats_mean_nothing():
    last = torch.channels_last
    compare(
        lambda x: (
            x.contiguous(memory_format=last)
            + x[:1].to(memory_format=last)
            + x.clone(memory_format=last)
        ),
        torch.randn(2, 3, 2, 2),
    )


# -- in place -------------------------------------------------------------------------------------

ONES = torch.ones(3, 4)
IN_PLACE = {
    **{
        name: ()
        for name in (
            *("abs_", "absolute_", "acos_", "cos_", "erf_", "erfc_", "exp_", "exp2_"),
            *("expm1_", "floor_", "frac_", "log_", "log10_", "log1p_", "log2_"),
            *("nan_to_num_", "neg_", "reciprocal_", "round_", "rsqrt_", "sin_", "sinh_"),
            *("square_", "tan_", "tril_", "trunc_"),
        )
    },
    "addcmul_": (ONES, ONES * 2),
    "addmm_": (torch.ones(3, 2), torch.ones(2, 4)),
    "clamp_": (0.4, 0.7),
    "clamp_max_": (0.5,),
    "cumsum_": (1,),
    "fill_diagonal_": (3.0,),
    "fmod_": (0.3,),
    "hypot_": (ONES,),
    "index_fill_": (0, torch.tensor([0, 2]), 2.0),
    "lerp_": (ONES, 0.3),
    "masked_fill_": (torch.eye(3, 4) > 0, 2.0),
}


def test_in_place_methods():
    def run(x):
        parts = []
        for name, given in IN_PLACE.items():
            part = x * 1
            out = getattr(part, name)(*given)
            parts.append(out + 2 * part)
        return torch.stack(parts)

    compare(run, torch.linspace(0.1, 0.9, 12).reshape(3, 4))


def test_in_place_methods_on_parts_and_other_dtypes():
    def run(x):
        flags = x > 0.5
        flags.logical_and_(x < 0.8)
        y = torch.zeros_like(x)
        y[1].add_(x[1]).neg_()
        y[:, 0].copy_(x[:, 0]).sin_()
        return y * flags + y

    compare(run, torch.linspace(0.1, 0.9, 12).reshape(3, 4))


def drawn_again(x):
    """As `trunc_normal_` since PyTorch 2.13."""
    while (x > 2).any():
        x.normal_()
    return x


@pytest.mark.parametrize("draw", [drawn_again, nn.init.trunc_normal_])
def test_what_needs_values_is_refused_and_not_skipped(draw):
    if draw is nn.init.trunc_normal_ and ".any()" not in inspect.getsource(nn.init):
        pytest.skip("this PyTorch draws once")
    model = tt.inference_model(Call(lambda x: draw(x.clone())))
    with pytest.raises(tr.TailraceError, match="traced once"):
        model(torch.ones(3))


# -- views ----------------------------------------------------------------------------------------

WRITES = {
    "view": lambda x: x.view(-1).add_(1),
    "an element": lambda x: x.view(-1).__setitem__(2, 7.0),
    "reshape": lambda x: x.reshape(4, 3)[1].mul_(2),
    "t": lambda x: x.t().mul_(2),
    "T": lambda x: x.T[0].mul_(2),
    "transpose": lambda x: x.transpose(0, 1)[1].zero_(),
    "permute": lambda x: x.permute(1, 0).relu_(),
    "unsqueeze": lambda x: x.unsqueeze(0).add_(1),
    "squeeze": lambda x: x[None].squeeze(0).add_(1),
    "narrow": lambda x: x.narrow(1, 1, 2).fill_(3.0),
    "diagonal": lambda x: x.diagonal().fill_(3.0),
    "flatten": lambda x: F.relu(x.flatten(), inplace=True),
    "select": lambda x: x.select(1, 2).fill_(9.0),
    "movedim": lambda x: x.movedim(0, 1).add_(torch.arange(3.0)),
    "swapaxes": lambda x: x.swapaxes(0, 1).mul_(2.0),
    "mT": lambda x: x.mT.mul_(2.0),
    "unfold": lambda x: x.unfold(1, 2, 2).fill_(3.0),
    "views of views": lambda x: x.view(2, 6).t()[1:3].unsqueeze(0).add_(5.0),
    "a view of a slice": lambda x: x[1:].view(-1)[:3].fill_(1.0),
    "slices": lambda x: (x[1].zero_(), x[:, 0].fill_(4.0)),
    "a copy": lambda x: x.t().reshape(-1).fill_(3.0),
    "another copy": lambda x: x.t().contiguous().fill_(3.0),
    "no copy": lambda x: x.contiguous().add_(1.0),
}


def test_what_is_written_through_a_view_is_written():
    def run(x):
        parts = []
        for write in WRITES.values():
            part = x * 1
            write(part)
            parts.append(part * 2)
        return torch.stack(parts)

    compare(run, torch.arange(12.0).reshape(3, 4) - 5)


def test_views_see_what_is_written_elsewhere():
    def run(x):
        x = x * 1
        row, column = x.view(-1), x.t()
        x.add_(1)
        row[0] = 100.0
        x[0, 1] = 50.0
        row[2] = 70.0
        total = x.sum()
        column[1, 1] = 3.0
        del column
        cast = x.half().type_as(x)
        return torch.cat([row, x.t().reshape(-1), cast.flatten() * total])

    compare(run, torch.arange(12.0).reshape(3, 4) - 5)


def test_buffers_written_through_views():
    class Counts(nn.Module):
        seen: torch.Tensor

        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(2, 3))

        def forward(self, x):
            self.seen.view(-1)[1:3].add_(x.sum())
            return x * 2

    model, plain = Counts(), Counts()
    run = ModuleFunction(model, training_modes(model))
    fill = lambda wrap: ((wrap(jax.numpy.ones(2)),), {})  # noqa: E731
    ran = run({}, {"seen": jax.numpy.zeros((2, 3))}, fill, jax.random.key(0))
    plain(torch.ones(2))
    assert_close(np.asarray(ran.buffers["seen"]), plain.seen.numpy())


HELD = torch.arange(3.0)

FILLED = {
    "by indices": lambda out, x: out.__setitem__((slice(None), 0), x[:, 0]),
    "by methods": lambda out, x: out.add_(x).mul_(2),
    "by masks": lambda out, x: out.add_(x).__setitem__(out > 0, 0.5),
    "by out=": lambda out, x: torch.mul(x.detach(), 2, out=out),
    "in turns": lambda out, x: [out[1].add_(1), out.add_(x), out[0].mul_(3), out.sub_(1)],
    "without a gradient": lambda out, x: _quietly(lambda: out.add_(x)),
}


def _quietly(function):
    with torch.no_grad():
        return function()


@pytest.mark.parametrize("name", FILLED)
def test_tensors_of_the_host_that_forward_fills(name):
    def run(x):
        made, copied = torch.zeros(2, 3, device="cpu"), HELD.expand(2, 3).clone()
        for out in (made, copied):
            FILLED[name](out, x)
        return (made * made).sum() + (made + x).sum() * copied.sum()

    compare(run, torch.arange(6.0).reshape(2, 3) - 2.5)


def test_tensors_of_the_host_that_are_only_read():
    def run(x):
        with torch.no_grad():
            same = HELD.to(x)
        return x * same + HELD.type_as(x)

    compare(run, torch.arange(6.0).reshape(2, 3))


def test_what_forward_fills_is_returned():
    def run(x):
        out = torch.zeros(2, 3, device="cpu")
        out[:, 1] = x[:, 0]
        return out

    compare(run, torch.ones(2, 3))


@pytest.mark.parametrize(
    "write",
    [
        lambda x: HELD.add_(x),
        lambda x: HELD.__setitem__(0, x[0]),
        lambda x: HELD.view(-1).mul_(x),
        lambda x: torch.zeros(6, device="cpu")[:3].add_(x),
    ],
)
def test_values_that_would_be_lost_on_the_host_are_refused(write):
    with pytest.raises(tr.TailraceError, match=r"into a tensor of the host.*register_buffer"):
        ours(lambda x: (write(x), x)[1], torch.ones(3))
    assert torch.equal(HELD, torch.arange(3.0))


@pytest.mark.parametrize(
    "of",
    [
        lambda x: x.data,
        lambda x: x[0].data,
        lambda x: x[0].detach(),
        lambda x: torch.detach(x),
        lambda x: torch.detach(x[1]),
        lambda x: x.detach_(),
        lambda x: torch.detach_(x + 1),
        lambda x: torch.tensor(x),
        lambda x: torch.tensor([x.sum(), 1]),
        lambda x: torch.as_tensor([x[0, 0], x.sum()]),
    ],
)
@pytest.mark.filterwarnings("ignore:To copy construct")
@pytest.mark.filterwarnings("ignore:Converting a tensor")
def test_copies_without_a_gradient(of):
    compare(lambda x: (x * 3).sum() * of(x * 2).sum(), torch.arange(6.0).reshape(2, 3) - 2)


def test_data_is_written():
    def run(x):
        y, z = x * 1, x * 1
        y.data.mul_(2)
        y.data[0] = 5.0
        z.data = z.data + 1
        return y * y + z

    compare(run, torch.arange(6.0).reshape(2, 3))
    with pytest.raises(tr.TailraceError, match=r"setting \.data of a slice"):
        ours(lambda x: setattr(x[0], "data", x[1]), torch.ones(2, 3))


# -- batch normalisation ----------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(6, 4), (4, 3, 5, 5), (2, 3, 2, 2, 2)])
@pytest.mark.parametrize("affine", [False, True])
def test_batch_norm_and_its_gradients(shape, affine):
    torch.manual_seed(0)
    x, some = 3 * torch.randn(shape) + 1, [torch.randn(shape[1]) for _ in range(2 * affine)]
    compare(lambda x, *some: F.batch_norm(x, None, None, *some, training=True), x, *some)


def normalisation(function):
    """A number that depends on the three results of a normalisation."""

    def total(x, weight, bias):
        out, mean, var = function(x, weight, 1e-3)
        out = jax.numpy.sin(out + bias.reshape(1, -1, 1, 1)) * np.cos(np.arange(x.size)).reshape(
            x.shape
        )
        return out.sum() + (mean**2).sum() + (var**2).sum()

    return total


def derivatives(function, *given):
    """First derivatives, and those of their squares."""
    each = tuple(range(len(given)))
    first = jax.grad(function, each)
    second = jax.grad(lambda *given: sum((g**2).sum() for g in first(*given)), each)
    return [np.float32(g) for some in (first, second) for g in jax.jit(some)(*given)]


def test_the_derivative_of_batch_norm_is_that_of_its_formula():
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        given = [rng.normal(size=size) for size in ((4, 3, 2, 2), 3, 3)]
        found = derivatives(normalisation(normalised), *given)
        expected = derivatives(normalisation(normalised.fun), *given)
    assert_close(found, expected)


@pytest.mark.cpu
def test_the_backward_pass_of_batch_norm_has_two_sums():
    shapes = [jax.ShapeDtypeStruct(size, "float32") for size in ((4, 3, 2, 2), (3,), (3,))]

    def total(x, weight, bias):
        return jax.numpy.sin(normalised(x, weight, 1e-3)[0] + bias.reshape(1, -1, 1, 1)).sum()

    text = jax.jit(jax.grad(total, (0, 1, 2))).lower(*shapes).compile().as_text()
    # Two more are mean and variance.
    assert len(re.findall(r"f32\[3\]\S* reduce\(", text)) == 4
