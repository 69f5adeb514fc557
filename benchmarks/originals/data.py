"""Small real data in place of what programs would download.

Loaders of Keras and torchvision are replaced, in the process that runs a program. Digits are real
(`tr.data.digits`); they stand for photographs too, in their shapes. Reviews are made up: a word of
praise or of blame among others decides what a review says, so that a model can learn it. Models of
`transformers` are small and have random weights; their words are those of the program's own texts.
Questions about texts are made up, too (`squad`).
"""

from __future__ import annotations

import os
import pathlib
import re
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np

import tailrace as tr
from benchmarks.originals import squad

TRAIN, TEST = 3840, 1152
"""How many images of digits there are: multiples of the batch sizes that programs use."""

PHOTOGRAPHS = 256, 256
"""How many images in the shape of photographs: few, because programs run many epochs."""

Arrays = tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]


def digits() -> Arrays:
    """Images [n, 28, 28] of uint8, and what they show."""
    images, labels = tr.data.digits()
    order = np.arange(TRAIN + TEST) % len(images)
    images, labels = images[order], labels[order].astype(np.uint8)
    return (images[:TRAIN], labels[:TRAIN]), (images[TRAIN:], labels[TRAIN:])


def photographs() -> Arrays:
    """The digits as images [n, 32, 32, 3], labels [n, 1]."""
    counts = zip(digits(), PHOTOGRAPHS, strict=True)
    parts = [(images[:count], labels[:count]) for (images, labels), count in counts]
    grown = [np.pad(images, ((0, 0), (2, 2), (2, 2))) for images, _ in parts]
    colours = [np.repeat(images[..., None], 3, axis=-1) for images in grown]
    return (colours[0], parts[0][1][:, None]), (colours[1], parts[1][1][:, None])


def reviews(num_words: int = 20000, **_: Any) -> Arrays:
    """Lists of numbers of words, of different lengths, and whether each is favourable."""
    random = np.random.default_rng(0)
    labels = random.integers(0, 2, 2048)
    praise, blame = 5, 6
    texts = np.empty(len(labels), object)
    for index, label in enumerate(labels):
        words = random.integers(10, num_words, random.integers(20, 120))
        words[random.integers(0, len(words), 8)] = praise if label else blame
        texts[index] = words.tolist()
    return (texts[:1536], labels[:1536]), (texts[1536:], labels[1536:])


def supply() -> None:
    """Replace the loaders of the libraries that are installed."""
    supply_keras()
    supply_torch()


def supply_keras(plain: bool = False) -> None:
    """Replace the loaders of Keras.

    Args:
        plain: whether it is used without Tailrace.
    """
    if plain:
        import keras
    else:
        from tailrace.compat.tensorflow import keras

    loaders: dict[str, Callable[..., Arrays]] = {
        "mnist": lambda *_, **__: digits(),
        "fashion_mnist": lambda *_, **__: digits(),
        "cifar10": lambda *_, **__: photographs(),
        "imdb": lambda *_, **options: reviews(**options),
    }
    for name, load in loaders.items():
        getattr(keras.datasets, name).load_data = load


def _few_workers(torch: Any) -> None:
    """Let loaders have as many processes as there are cores: programs ask for up to 40."""
    loader = torch.utils.data.DataLoader
    plain, cores = loader.__init__, os.cpu_count() or 1

    def made(self: Any, *args: Any, num_workers: int = 0, **options: Any) -> None:
        plain(self, *args, num_workers=min(num_workers, cores), **options)

    loader.__init__ = made


def supply_torch() -> None:
    """Replace the loaders of torchvision, if there is one."""
    try:
        import torch
    except ImportError:
        return
    _few_workers(torch)
    # A torchvision for another build of torch lacks compiled operators, which nothing here uses.
    sys.modules.setdefault(
        "torchvision._meta_registrations", types.ModuleType("torchvision._meta_registrations")
    )
    try:
        import torchvision
    except ImportError:
        return
    from PIL import Image

    def made(arrays: Arrays) -> type:
        class Images(torchvision.datasets.VisionDataset):
            def __init__(self, root: Any, train: bool = True, transform: Any = None, **_: Any):
                super().__init__(root, transform=transform)
                images, labels = arrays[0 if train else 1]
                self.data, self.targets = images, [int(label) for label in labels.reshape(-1)]
                self.classes = [str(number) for number in range(10)]

            def __len__(self) -> int:
                return len(self.data)

            def __getitem__(self, index: int) -> Any:
                image = Image.fromarray(self.data[index])
                image = self.transform(image) if self.transform else image
                return image, self.targets[index]

        # Loaders with workers find a class again by its name in this module.
        Images.__qualname__ = f"Images{len(globals())}"
        globals()[Images.__qualname__] = Images
        return Images

    torchvision.datasets.MNIST = torchvision.datasets.FashionMNIST = made(digits())
    torchvision.datasets.CIFAR10 = made(photographs())


def supply_transformers() -> None:
    """Replace what `transformers` would download: words of a tokenizer, weights of a model."""
    import torch
    import transformers

    # Not of the programs themselves: their imports differ between the two runs.
    given = [path.read_text().lower() for path in sorted(pathlib.Path().glob("*.txt"))]
    texts = " ".join([*given, *squad.PEOPLE, *squad.TOWNS, "where is in ? ."])
    words = sorted(set(re.findall(r"\w+|[^\w\s]", texts)))
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]

    def tokenizer(kind: Any, *_: Any, cache_dir: Any = None, **options: Any) -> Any:
        path = pathlib.Path("words_of_the_tokenizer.txt")
        path.write_text("\n".join(words))
        return kind(str(path), **options)

    saved = transformers.PreTrainedModel.from_pretrained.__func__

    def model(kind: Any, name: str, *args: Any, config: Any = None, **options: Any) -> Any:
        if pathlib.Path(name).is_dir():  # what the program itself has saved
            return saved(kind, name, *args, **options)
        torch.manual_seed(0)
        given = {} if config is None else config.to_dict()
        layers = 2 if config is None else 5  # on the first two of a program's four devices
        sizes = {"hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 128}
        sizes |= {"num_hidden_layers": layers, "vocab_size": len(words)}
        return kind(kind.config_class(**given | sizes))

    for kind in (transformers.BertTokenizer, transformers.BertTokenizerFast):
        kind.from_pretrained = classmethod(tokenizer)
    transformers.PreTrainedModel.from_pretrained = classmethod(model)
    datasets: Any = types.ModuleType("datasets")
    datasets.load_dataset, datasets.load_metric = squad.load_dataset, squad.load_metric
    sys.modules.setdefault("datasets", datasets)
    import tqdm

    sys.modules["tqdm.notebook"] = tqdm  # bars of a notebook need one
