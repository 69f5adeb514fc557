"""A captured module trains as in eager PyTorch: losses of several steps, weights and buffers."""

import dataclasses
from collections import OrderedDict

import pytest
import torch
from eager import rows, same_as_eager
from small_modules import seeded
from torch import nn
from torch.nn import functional

import tailrace.torch as tt
from oracles import assert_bits_equal, assert_close


class Squared(nn.Module):
    """The mean square of what a module computes."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *given):
        out = self.inner(*given)
        out = out[0] if isinstance(out, tuple) else out
        return {"loss": out.float().pow(2).mean(), "out": out}


class KeysAndValues:
    """What a layer keeps for later: an object of a class of its own, as caches are."""

    def __init__(self, configuration):
        self.keys, self.values = None, None
        self.configuration = configuration

    def update(self, keys, values):
        self.keys, self.values = keys, values
        return keys, values


class Cache:
    """One for each layer."""

    def __init__(self, layers, configuration):
        self.layers = [KeysAndValues(configuration) for _ in range(layers)]


@dataclasses.dataclass
class Configuration:
    """Of the language model."""

    words: int = 11
    features: int = 8
    layers: int = 2


class ModelOutput(OrderedDict):
    """A dict whose items are attributes, as those of public models."""

    def __init__(self, **items):
        super().__init__({name: value for name, value in items.items() if value is not None})
        for name, value in items.items():
            setattr(self, name, value)


class Layer(nn.Module):
    """Causal attention with one head."""

    def __init__(self, features, number):
        super().__init__()
        self.qkv, self.out = nn.Linear(features, 3 * features), nn.Linear(features, features)
        self.norm, self.number = nn.LayerNorm(features), number

    def forward(self, x, cache):
        query, keys, values = self.qkv(self.norm(x)).chunk(3, -1)
        keys, values = cache.layers[self.number].update(keys, values)
        found = functional.scaled_dot_product_attention(
            query[:, None], keys[:, None], values[:, None], is_causal=True
        )
        return x + self.out(found[:, 0])


class LanguageModel(nn.Module):
    """Tied embeddings, shifted labels, a cache and an output object, as in public models."""

    def __init__(self, configuration=None):
        super().__init__()
        self.configuration = config = configuration or Configuration()
        self.embedding = nn.Embedding(config.words, config.features)
        self.layers = nn.ModuleList(Layer(config.features, n) for n in range(config.layers))
        self.head = nn.Linear(config.features, config.words, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids, labels=None, use_cache=True):
        cache = Cache(len(self.layers), self.configuration)
        x = self.embedding(ids)
        for layer in self.layers[: self.configuration.layers]:
            x = layer(x, cache)
        logits, loss = self.head(x), None
        if labels is not None:
            shifted = functional.pad(labels, (0, 1), value=-100)[:, 1:]
            loss = functional.cross_entropy(logits.flatten(0, 1), shifted.flatten())
        return ModelOutput(loss=loss, logits=logits, cache=cache if use_cache else None)


def words(count=3):
    """Batches of word numbers, twice: the labels are the words."""
    torch.manual_seed(2)
    return [(ids, ids) for ids in (torch.randint(0, 11, (4, 6)) for _ in range(count))]


def test_a_language_model_with_a_cache_trains_as_written():
    model, out, expected = same_as_eager(LanguageModel, words(), loss=None, of=lambda out: out.loss)
    assert type(out) is ModelOutput
    assert type(out.cache) is Cache
    assert out.logits is out["logits"]
    assert out.cache.layers[0].configuration is (model.module.configuration)
    for ours, theirs in zip(out.cache.layers, expected.cache.layers, strict=True):
        assert_close(ours.keys.numpy(), theirs.keys.detach().numpy())
    assert "param/head.weight" not in model.tensor_names()  # tied: one parameter, by its first name
    assert "activation/layers.1.norm" in model.tensor_names()


def test_outputs_of_several_iterations_are_stacked_in_their_objects():
    (first, second), module = words(2), seeded(LanguageModel)[0]
    options = {"device_iterations": 2, "output_mode": "all"}
    model = tt.training_model(module, torch.optim.SGD(module.parameters(), lr=0.1), **options)
    ids = torch.cat([first[0], second[0]])
    out = model(ids, ids)
    assert out.loss.shape == (2,)
    assert out.cache.layers[1].values.shape == (8, 6, 8)


def test_inference_returns_the_same_objects():
    module = seeded(LanguageModel)[0].eval()
    ids = words(1)[0][0]
    out, expected = tt.inference_model(module)(ids), module(ids)
    assert type(out) is ModelOutput
    assert out.loss is None
    assert_close(
        out.cache.layers[1].values.numpy(), expected.cache.layers[1].values.detach().numpy()
    )


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.LSTM(4, 5, batch_first=True),
        lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True),
        lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.GELU(), nn.LayerNorm(6)),
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)),
    ],
    ids=["lstm", "transformer", "norms", "parametrized"],
)
def test_layers_train_as_in_eager(make):
    norms = [(x,) for (x,) in rows()]
    sequences = [(x[:, None].repeat(1, 3, 1),) for (x,) in norms]
    plain = isinstance(make(), nn.Sequential | nn.Linear)
    same_as_eager(lambda: Squared(make()), norms if plain else sequences)


def test_convolutions_train_as_in_eager():
    torch.manual_seed(3)
    images = [(torch.randn(4, 3, 8, 8),) for _ in range(2)]

    def make():
        return Squared(
            nn.Sequential(
                nn.Conv2d(3, 4, 3, padding=1),
                nn.BatchNorm2d(4),
                nn.ReLU(),
                nn.MaxPool2d(2),
                nn.Flatten(),
                nn.Linear(64, 2),
            )
        )

    same_as_eager(make, images, lr=0.01)


class Counting(nn.Module):
    """Buffers that are written in place, and one that is replaced."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("last", torch.zeros(4))

    def forward(self, x):
        out = self.linear(x + 0) + self.last
        self.count += 1
        self.mean.mul_(0.9).add_(out.detach().mean(0), alpha=0.1)
        self.last = out.detach().mean(0)
        x.mul_(2)
        return {"loss": out.pow(2).mean() * self.count}


def test_buffers_and_arguments_are_followed():
    model, *_ = same_as_eager(Counting, rows())
    x = torch.ones(8, 4)
    model(x)
    assert torch.equal(x, torch.full((8, 4), 2.0))
    assert model.module.count == 4


class Dropping(nn.Module):
    """The share of what a dropout keeps."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))

    def forward(self, x):
        kept = functional.dropout(self.weight * x, 0.5)
        return {"loss": kept.mean(), "kept": kept}


def dropped(seed, **options):
    model = tt.training_model(
        Dropping(), None, "loss", seed=seed, device_iterations=3, output_mode="all", **options
    )
    return model(torch.ones(6 * options.get("replicas", 1), 64))["kept"].detach().numpy()


def test_dropout_differs_by_step_microbatch_and_replica_and_repeats_by_seed():
    found = dropped(1, accumulation=2, replicas=2)
    patterns = {(row != 0).tobytes() for row in found}
    assert len(patterns) == len(found) == 12
    assert_bits_equal(found, dropped(1, accumulation=2, replicas=2))
    assert (dropped(2) != dropped(1)).any()


def test_accumulation_and_replicas_are_the_mean_of_their_parts():
    data = torch.cat([x for (x,) in rows(4)])
    found = []
    for options in ({}, {"accumulation": 2, "replicas": 2}):
        module, _ = seeded(lambda: Squared(nn.Linear(4, 2)))
        model = tt.training_model(
            module, torch.optim.SGD(module.parameters(), lr=0.1), "loss", **options
        )
        model(data)
        model.copy_weights_to_host()
        found.append(module.inner.weight.detach().numpy())
    assert_close(*found)


def test_a_saved_model_goes_on(tmp_path):
    batches, make = rows(4), lambda: Squared(nn.Linear(4, 2))

    def model_of(module):
        optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
        return tt.training_model(module, optimizer, "loss")

    whole, first, second = (model_of(seeded(make)[0]) for _ in range(3))
    for batch in batches:
        whole(*batch)
    for batch in batches[:2]:
        first(*batch)
    first.save(tmp_path / "saved.npz")
    second.load(tmp_path / "saved.npz")
    for batch in batches[2:]:
        second(*batch)
    for model in (whole, second):
        model.copy_weights_to_host()
    assert_bits_equal(
        whole.module.inner.weight.detach().numpy(), second.module.inner.weight.detach().numpy()
    )


class Cast(nn.Module):
    """A region of bfloat16."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = self.linear(x)
            norm = functional.softmax(out, -1)
        return {"loss": out.float().pow(2).mean(), "out": out, "norm": norm}


def test_autocast_casts_as_in_eager():
    module, plain = seeded(Cast)
    model = tt.training_model(module, torch.optim.SGD(module.parameters(), lr=0.1), "loss")
    out, expected = model(*rows(1)[0]), plain(*rows(1)[0])
    for name in ("loss", "out", "norm"):
        assert out[name].dtype == expected[name].dtype
        found, wanted = (v[name].detach().float().numpy() for v in (out, expected))
        assert abs(found - wanted).max() < 2e-2
