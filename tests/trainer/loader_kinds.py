"""Kinds of loaders, each as a function that makes a fresh one, as a script does when it is started.

A kind returns the dataset, or the dataset and what the script does with it before each epoch. Every
loader has `ELEMENTS` elements, and a different order in each epoch if it shuffles.
"""

import io
import random
import tempfile

import numpy as np
import pytest

import tailrace as tr

ELEMENTS = 8
KINDS = {}
REFUSED = {}
"""The sentence with which `fit` refuses those that it does not iterate."""


def kind(function):
    KINDS[function.__name__] = function
    return function


def refused(match):
    def add(function):
        REFUSED[function.__name__] = match
        return kind(function)

    return add


def element(number):
    return (np.full(2, number, np.float32),)


def plain_loop(made, epochs):
    """What a `for` loop gets: the number of each element."""
    loader, before_epoch = made if isinstance(made, tuple) else (made, None)
    seen = []
    for epoch in range(epochs):
        if before_epoch is not None:
            before_epoch(epoch)
        again = loader() if callable(loader) and not hasattr(loader, "__iter__") else loader
        for batch in again:
            first = batch["x"] if isinstance(batch, dict) else batch[0]
            seen.append(float(np.mean(np.asarray(first, np.float32))))
    return seen


class Numbered:
    """Examples of a PyTorch DataLoader."""

    def __init__(self, count=ELEMENTS, noise=False):
        self.count, self.noise = count, noise

    def __len__(self):
        return self.count

    def __getitem__(self, row):
        import torch

        # Twentieths, so that sums of them are exact.
        more = float(torch.randint(16, ())) / 16 if self.noise else 0.0
        return torch.full((2,), float(row) + more)


def torch_data():
    return pytest.importorskip("torch").utils.data


# -- PyTorch ----------------------------------------------------------------------------------------


def collate(rows):
    return (rows[0],)


@kind
def torch_shuffle_with_a_generator():
    data = torch_data()
    import torch

    own = torch.Generator().manual_seed(3)
    return data.DataLoader(Numbered(), shuffle=True, generator=own, collate_fn=collate)


@kind
def torch_shuffle_with_the_global_seed():
    data = torch_data()
    import torch

    torch.manual_seed(5)
    return data.DataLoader(Numbered(noise=True), shuffle=True, collate_fn=collate)


@kind
def torch_shuffle_without_a_seed():
    data = torch_data()
    return data.DataLoader(Numbered(), shuffle=True, collate_fn=collate)


@kind
def torch_weighted_sampler():
    data = torch_data()
    import torch

    own = torch.Generator().manual_seed(4)
    sampler = data.WeightedRandomSampler([1.0] * 4 + [3.0] * 4, ELEMENTS, generator=own)
    return data.DataLoader(Numbered(), sampler=sampler, collate_fn=collate)


@kind
def torch_sampler_that_shuffles_its_list():
    data = torch_data()

    class Sampler(data.Sampler):
        def __init__(self):
            self.rows, self.random = list(range(ELEMENTS)), random.Random(2)

        def __iter__(self):
            self.random.shuffle(self.rows)
            return iter(self.rows)

        def __len__(self):
            return ELEMENTS

    return data.DataLoader(Numbered(), sampler=Sampler(), collate_fn=collate)


@kind
def torch_batch_sampler_that_counts_epochs():
    data = torch_data()

    class BatchSampler:
        def __init__(self):
            self.epochs = 0

        def __iter__(self):
            for row in np.random.default_rng(self.epochs).permutation(ELEMENTS):
                yield [int(row)]
            self.epochs += 1

        def __len__(self):
            return ELEMENTS

    return data.DataLoader(Numbered(), batch_sampler=BatchSampler(), collate_fn=collate)


@kind
def torch_distributed_sampler_with_set_epoch():
    data = torch_data()
    sampler = data.DistributedSampler(Numbered(), num_replicas=1, rank=0, seed=9)
    loader = data.DataLoader(Numbered(), sampler=sampler, collate_fn=collate)
    return loader, sampler.set_epoch


@kind
def torch_workers_that_draw():
    data = torch_data()
    import torch

    torch.manual_seed(7)
    return data.DataLoader(
        Numbered(noise=True), shuffle=True, num_workers=1, collate_fn=collate, timeout=60
    )


@kind
def torch_persistent_workers_that_draw():
    data = torch_data()
    import torch

    own = torch.Generator().manual_seed(8)
    return data.DataLoader(
        Numbered(noise=True),
        shuffle=True,
        generator=own,
        num_workers=1,
        persistent_workers=True,
        collate_fn=collate,
        timeout=60,
    )


@kind
def torch_iterable_dataset():
    data = torch_data()

    class Stream(data.IterableDataset):
        def __init__(self):
            self.passes = []

        def __iter__(self):
            order = np.random.default_rng(len(self.passes)).permutation(ELEMENTS)
            yield from (np.full(2, row, np.float32) for row in order)
            self.passes.append("whole")

    return data.DataLoader(Stream(), collate_fn=collate)


@refused("smaller last batch: drop it")
def torch_smaller_last_batch():
    data = torch_data()
    return data.DataLoader(Numbered(15), batch_size=2)


# -- Accelerate, Hugging Face -----------------------------------------------------------------------


class AccelerateLike:
    """Reads one element ahead, and seeds the next order after its last element."""

    def __init__(self):
        self.iteration, self.synchronised = 0, 0

    def set_epoch(self, epoch):
        self.iteration = epoch

    def __len__(self):
        return ELEMENTS

    def __iter__(self):
        rows = iter(np.random.default_rng(self.iteration).permutation(ELEMENTS))
        current = next(rows)
        for following in rows:
            yield element(current)
            current = following
        yield element(current)
        self.iteration += 1
        self.synchronised += 1


@kind
def accelerate_like():
    return AccelerateLike()


@kind
def accelerate_like_with_set_epoch():
    loader = AccelerateLike()
    return loader, lambda epoch: loader.set_epoch(10 * epoch)


@kind
def hugging_face_iter():
    class Rows:
        def __init__(self):
            self.epoch = 0

        def set_epoch(self, epoch):
            self.epoch = epoch

        def iter(self, batch_size):
            order = np.random.default_rng(self.epoch).permutation(ELEMENTS * batch_size)
            for first in range(0, len(order), batch_size):
                numbers = [float(row) for row in order[first : first + batch_size]]
                yield {"x": [[number, number + 1.0] for number in numbers]}

    rows = Rows()
    return (lambda: rows.iter(2)), rows.set_epoch


@kind
def hugging_face_shuffled_stream():
    class Shuffled:
        def __init__(self):
            self.epoch, self.buffer_size = 0, 3

        def set_epoch(self, epoch):
            self.epoch = epoch

        def __iter__(self):
            drawn, buffer = np.random.default_rng(20 + self.epoch), []
            for row in range(ELEMENTS):
                if len(buffer) == self.buffer_size:
                    at = drawn.integers(self.buffer_size)
                    yield {"x": np.full(2, buffer[at], np.float32)}
                    buffer[at] = row
                else:
                    buffer.append(row)
            drawn.shuffle(buffer)
            yield from ({"x": np.full(2, row, np.float32)} for row in buffer)

    loader = Shuffled()
    return loader, loader.set_epoch


@kind
def list_of_dicts():
    return [{"x": np.full(2, row, np.float32)} for row in range(ELEMENTS)]


@kind
def torchdata_stateful_loader():
    class Stateful:
        def __init__(self):
            self.epoch = self.row = 0
            self.loaded = False

        def state_dict(self):
            return {"epoch": self.epoch, "row": self.row}

        def load_state_dict(self, state):
            self.epoch, self.row, self.loaded = state["epoch"], state["row"], True

        def __iter__(self):
            if not self.loaded:
                self.row = 0
            self.loaded = False
            order = np.random.default_rng(self.epoch).permutation(ELEMENTS)
            while self.row < ELEMENTS:
                self.row += 1
                yield element(order[self.row - 1])
            self.epoch, self.row = self.epoch + 1, 0

    return Stateful()


# -- tf.data, Grain, Keras --------------------------------------------------------------------------


@kind
def tf_data_reshuffled():
    tf = pytest.importorskip("tensorflow")
    tf.random.set_seed(1)
    data = tf.data.Dataset.range(ELEMENTS).shuffle(ELEMENTS, seed=4)
    return data.map(lambda row: (tf.fill([2], tf.cast(row, tf.float32)),))


@kind
def tf_data_reshuffled_and_repeated():
    tf = pytest.importorskip("tensorflow")
    tf.random.set_seed(1)
    data = tf.data.Dataset.range(ELEMENTS // 2).shuffle(ELEMENTS, seed=4).repeat(2)
    return data.map(lambda row: (tf.fill([2], tf.cast(row, tf.float32)),))


@kind
def tf_data_from_a_generator():
    tf = pytest.importorskip("tensorflow")
    own = np.random.default_rng(6)

    def rows():
        yield from ((np.full(2, row, np.float32),) for row in own.permutation(ELEMENTS))

    return tf.data.Dataset.from_generator(rows, output_signature=(tf.TensorSpec(2, tf.float32),))


class Elements:
    def __len__(self):
        return ELEMENTS

    def __getitem__(self, row):
        return element(row)

    def __repr__(self):
        return "Elements()"


@kind
def grain_map_dataset():
    grain = pytest.importorskip("grain")
    return grain.MapDataset.source(Elements()).shuffle(seed=3)


@kind
def grain_iter_dataset():
    grain = pytest.importorskip("grain")
    one_thread = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    return grain.MapDataset.source(Elements()).shuffle(seed=3).to_iter_dataset(one_thread)


@kind
def grain_loader():
    grain = pytest.importorskip("grain")
    sampler = grain.samplers.IndexSampler(
        ELEMENTS, grain.sharding.NoSharding(), shuffle=True, num_epochs=1, seed=2
    )
    return grain.DataLoader(data_source=Elements(), sampler=sampler, worker_count=0)


@kind
def keras_py_dataset():
    keras = pytest.importorskip("keras")

    class Data(keras.utils.PyDataset):
        def __init__(self):
            super().__init__()
            self.rows, self.drawn = np.arange(ELEMENTS), np.random.default_rng(5)

        def __len__(self):
            return ELEMENTS

        def __getitem__(self, index):
            # Past the end it gives an empty batch, as a slice of an array does.
            return np.repeat(self.rows[index : index + 1], 2).astype(np.float32), np.float32(0)

        def on_epoch_end(self):
            self.drawn.shuffle(self.rows)

    class AsKerasReadsIt:
        """The plain loop: by index, then the end of the epoch is announced."""

        def __init__(self, data):
            self.data = data

        def __iter__(self):
            for index in range(len(self.data)):
                yield self.data[index]
            self.data.on_epoch_end()

    data = Data()
    data.plain = AsKerasReadsIt(data)
    return data


# -- Python -----------------------------------------------------------------------------------------


@refused("can be read only once")
def generator():
    return (element(row) for row in range(ELEMENTS))


@kind
def generator_function():
    drawn = np.random.default_rng(1)

    def elements():
        for row in drawn.permutation(ELEMENTS):
            yield element(row)

    return elements


@kind
def class_that_draws_from_numpy_for_each_element():
    np.random.seed(3)

    class Noisy:
        def __iter__(self):
            for row in np.random.permutation(ELEMENTS):
                yield element(row + np.random.randint(16) / 16)

    return Noisy()


@kind
def class_that_shuffles_its_list():
    random.seed(4)

    class Shuffles:
        def __init__(self):
            self.rows = list(range(ELEMENTS))

        def __iter__(self):
            random.shuffle(self.rows)
            return map(element, self.rows)

        def __len__(self):
            return ELEMENTS

    return Shuffles()


@kind
def class_with_an_unseeded_generator():
    class Unseeded:
        def __init__(self):
            self.drawn = np.random.default_rng()

        def __iter__(self):
            return map(element, self.drawn.permutation(ELEMENTS))

    return Unseeded()


class CountsAfterTheLast:
    def __init__(self):
        self.epoch = 0

    def __iter__(self):
        yield from map(element, np.random.default_rng(self.epoch).permutation(ELEMENTS))
        self.epoch += 1


@kind
def class_that_counts_after_the_last_element():
    return CountsAfterTheLast()


@kind
def class_that_counts_finally():
    class CountsFinally:
        def __init__(self):
            self.epochs = [0]

        def __iter__(self):
            try:
                drawn = np.random.default_rng(len(self.epochs))
                yield from map(element, drawn.permutation(ELEMENTS))
            finally:
                self.epochs.append(0)

        def __len__(self):
            return ELEMENTS

    return CountsFinally()


@kind
def length_too_small():
    class Small(CountsAfterTheLast):
        def __len__(self):
            return ELEMENTS - 3

    return Small()


@kind
def length_too_large():
    class Large(CountsAfterTheLast):
        def __len__(self):
            return ELEMENTS + 3

    return Large()


@kind
def length_that_raises():
    class Raises(CountsAfterTheLast):
        def __len__(self):
            raise NotImplementedError("a stream has no length")

    return Raises()


@kind
def only_getitem():
    class Sequence:
        def __getitem__(self, row):
            if row >= ELEMENTS:
                raise IndexError(row)
            return element(row)

    return Sequence()


@kind
def iterator_that_begins_anew():
    class Own:
        def __init__(self):
            self.passes = 0

        def __iter__(self):
            self.rows = iter(np.random.default_rng(self.passes).permutation(ELEMENTS))
            self.passes += 1
            return self

        def __next__(self):
            return element(next(self.rows))

    return Own()


@kind
def iterator_that_is_reset_at_its_end():
    class Reset:
        def __init__(self):
            self.reset()

        def reset(self):
            self.row = 0

        def __iter__(self):
            return self

        def __next__(self):
            if self.row == ELEMENTS:
                self.reset()
                raise StopIteration
            self.row += 1
            return element(self.row)

    return Reset()


@kind
def iterators_with_a_state():
    class Iterator:
        def __init__(self, order):
            self.order, self.row = order, 0

        def __next__(self):
            if self.row == ELEMENTS:
                raise StopIteration
            self.row += 1
            return element(self.order[self.row - 1])

        def __iter__(self):
            return self

        def get_state(self):
            return self.row

        def set_state(self, row):
            self.row = row

    class Loader:
        def __init__(self):
            self.drawn = np.random.default_rng(9)

        def __iter__(self):
            return Iterator(self.drawn.permutation(ELEMENTS))

    return Loader()


@kind
def file_that_is_mapped():
    with tempfile.NamedTemporaryFile(suffix=".npy") as file:
        np.save(file.name, np.repeat(np.arange(ELEMENTS, dtype=np.float32), 2).reshape(-1, 2))
        rows = np.load(file.name, mmap_mode="r")

    class File:
        def __init__(self):
            self.drawn = np.random.default_rng(2)

        def __iter__(self):
            for row in self.drawn.permutation(len(rows)):
                yield (rows[row],)

    return File()


@kind
def arrays_of_a_file():
    file = io.BytesIO()
    np.savez(file, x=np.repeat(np.arange(ELEMENTS, dtype=np.float32), 2).reshape(-1, 2))
    file.seek(0)
    return tr.batches(dict(np.load(file)), 1, shuffle=True, seed=7)
