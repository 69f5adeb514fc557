"""Each foreign dataset against the real library; and none of them is imported by us."""

import ast
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np
import pytest

import tailrace.data
from tailrace.data.adapters import as_dataset
from tailrace.data.batches import batches
from tailrace.data.foreign import FOREIGN, GrainDataset, TensorFlowDataset, TorchDataLoader
from tailrace.errors import DataError

IMAGES = np.arange(24, dtype=np.uint8).reshape(6, 4)
LABELS = np.arange(6, dtype=np.int32)


@pytest.fixture(scope="module")
def tf():
    return pytest.importorskip("tensorflow")


@pytest.fixture(scope="module")
def torch():
    return pytest.importorskip("torch")


@pytest.fixture(scope="module")
def grain():
    return pytest.importorskip("grain")


def assert_is_the_stream(data, batch=2):
    for _ in range(2):  # all of them can be iterated again
        elements = list(data)
        assert len(elements) == len(LABELS) // batch
        for i, (image, label) in enumerate(elements):
            assert type(image) is np.ndarray
            assert image.dtype == np.uint8
            np.testing.assert_array_equal(image, IMAGES[i * batch : (i + 1) * batch])
            np.testing.assert_array_equal(label, LABELS[i * batch : (i + 1) * batch])


class Labelled(NamedTuple):
    image: object
    label: object


class TestTensorFlow:
    def test_the_stream(self, tf):
        dataset = tf.data.Dataset.from_tensor_slices((IMAGES, LABELS)).batch(2)
        data = as_dataset(dataset)
        assert isinstance(data, TensorFlowDataset)
        assert (data.length, data.endless, data.restartable) == (3, False, True)
        assert data.name == "tf.data dataset (BatchDataset)"
        assert_is_the_stream(data)

    def test_lengths(self, tf):
        numbers = tf.data.Dataset.range(6)
        assert (as_dataset(numbers.repeat()).length, as_dataset(numbers.repeat()).endless) == (
            None,
            True,
        )
        filtered = as_dataset(numbers.filter(_is_odd))
        assert (filtered.length, filtered.endless) == (None, False)
        assert [int(x) for x in filtered] == [1, 3, 5]

    def test_forms_and_dtypes(self, tf):
        dataset = tf.data.Dataset.from_tensors(
            {"a": Labelled(tf.ones(2, tf.bfloat16), tf.constant(True))}
        )
        element = next(iter(as_dataset(dataset)))
        assert isinstance(element["a"], Labelled)
        assert element["a"].image.dtype == ml_dtypes.bfloat16
        assert element["a"].label.shape == ()

    def test_none_is_an_empty_branch(self, tf):
        dataset = tf.data.Dataset.from_tensors((tf.zeros(2), None))
        assert next(iter(as_dataset(dataset)))[1] is None

    def test_strings_are_refused_by_name(self, tf):
        dataset = tf.data.Dataset.from_tensors({"x": 1, "text": "a"})
        with pytest.raises(DataError, match=r"leaf \['text'\] is a tf\.string.*drop it with map"):
            as_dataset(dataset)

    def test_ragged_and_sparse_are_refused_by_name(self, tf):
        ragged = tf.data.Dataset.from_tensors({"r": tf.ragged.constant([[1], [1, 2]])})
        with pytest.raises(DataError, match=r"leaf \['r'\] is described by a RaggedTensorSpec"):
            as_dataset(ragged)
        sparse = tf.data.Dataset.from_tensors(tf.sparse.eye(2))
        with pytest.raises(DataError, match="the array is described by a SparseTensorSpec"):
            as_dataset(sparse)

    def test_an_iterator_of_it_is_one_shot(self, tf):
        data = as_dataset(iter(tf.data.Dataset.range(3)))
        assert not data.restartable
        assert [int(x) for x in data] == [0, 1, 2]


def _is_odd(number):
    return number % 2 == 1


class TestTorch:
    def loader(self, torch, **options):
        dataset = torch.utils.data.TensorDataset(torch.tensor(IMAGES), torch.tensor(LABELS))
        return torch.utils.data.DataLoader(dataset, batch_size=2, **options)

    def test_the_stream(self, torch):
        data = as_dataset(self.loader(torch))
        assert isinstance(data, TorchDataLoader)
        assert (data.length, data.restartable) == (3, True)
        assert data.name == "PyTorch DataLoader over TensorDataset"
        assert_is_the_stream(data)
        assert type(next(iter(data))) is tuple  # the loader itself gives a list

    def test_forms(self, torch):
        examples = [{"a": (i, [float(i)]), "b": Labelled(i, i)} for i in range(4)]
        loader = torch.utils.data.DataLoader(examples, batch_size=2)
        element = next(iter(as_dataset(loader)))
        assert type(element["a"]) is tuple
        assert type(element["a"][1]) is tuple
        assert element["a"][1][0].tolist() == [0.0, 1.0]
        assert isinstance(element["b"], Labelled)

    def test_memory_is_shared(self, torch):
        tensor = torch.zeros(3)
        array = next(iter(as_dataset([tensor])))
        tensor[0] = 5
        assert array[0] == 5

    @pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
    def test_small_floats(self, torch, name):
        tensor = torch.tensor([1.5, -2.0]).to(getattr(torch, name))
        array = next(iter(as_dataset([tensor])))
        assert array.dtype == getattr(ml_dtypes, name)
        assert array.astype(np.float32).tolist() == [1.5, -2.0]

    def test_small_floats_of_any_layout(self, torch):
        tensor = torch.arange(6.0).to(torch.bfloat16).reshape(2, 3)
        turned, single = next(iter(as_dataset([(tensor.T, tensor[1, 1])])))
        assert turned.tolist() == [[0, 3], [1, 4], [2, 5]]
        assert single.shape == ()
        assert float(single) == 4

    def test_tensors_that_want_gradients(self, torch):
        weights = torch.ones(4, dtype=torch.bfloat16, requires_grad=True)
        (element,) = as_dataset([{"w": weights}])
        assert element["w"].dtype == ml_dtypes.bfloat16
        assert next(iter(batches(weights, 2))).shape == (2,)

    def test_an_iterable_dataset_has_no_length(self, torch):
        class Stream(torch.utils.data.IterableDataset):
            def __iter__(self):
                return iter(range(4))

        data = as_dataset(torch.utils.data.DataLoader(Stream(), batch_size=2))
        assert data.length is None
        assert [x.tolist() for x in data] == [[0, 1], [2, 3]]
        assert [int(x) for x in as_dataset(Stream())] == [0, 1, 2, 3]

    def test_strings_are_refused_by_name(self, torch):
        loader = torch.utils.data.DataLoader([{"x": 1, "t": "a"}] * 2, batch_size=2)
        with pytest.raises(DataError, match=r"leaf \['t'\]\[0\] holds strings"):
            next(iter(as_dataset(loader)))

    def test_sparse_is_refused_by_name(self, torch):
        with pytest.raises(DataError, match=r"leaf \[0\] is a Tensor, which numpy cannot read"):
            next(iter(as_dataset([[torch.eye(2).to_sparse()]])))

    def test_a_dataset_without_a_loader(self, torch):
        dataset = torch.utils.data.TensorDataset(torch.zeros(4))
        with pytest.raises(DataError, match=r"\(TensorDataset\) gives single examples.*Wrap it"):
            as_dataset(dataset)

    def test_a_tensor(self, torch):
        with pytest.raises(DataError, match=r"but an array was received: torch\.float32\[4\]"):
            as_dataset(torch.zeros(4))


class TestGrain:
    def source(self, grain):
        return grain.MapDataset.source([(IMAGES[i], LABELS[i]) for i in range(6)]).batch(2)

    def test_map_dataset(self, grain):
        data = as_dataset(self.source(grain))
        assert isinstance(data, GrainDataset)
        assert (data.restartable, data.endless) == (True, False)
        assert data.name == "grain BatchMapDataset"
        assert_is_the_stream(data)

    def test_iter_dataset(self, grain):
        data = as_dataset(self.source(grain).to_iter_dataset())
        assert isinstance(data, GrainDataset)
        assert_is_the_stream(data)

    def test_data_loader(self, grain):
        loader = grain.DataLoader(
            data_source=[(IMAGES[i], LABELS[i]) for i in range(6)],
            sampler=grain.samplers.SequentialSampler(num_records=6),
            operations=[grain.transforms.Batch(2)],
        )
        data = as_dataset(loader)
        assert isinstance(data, GrainDataset)
        assert_is_the_stream(data)

    def test_a_filter_makes_the_length_uncertain(self, grain):
        data = as_dataset(grain.MapDataset.range(6).filter(lambda x: x % 2 == 0))
        assert data.length is None
        assert [int(x) for x in data] == [0, 2, 4]

    def test_endless(self, grain):
        assert as_dataset(grain.MapDataset.range(6).repeat().batch(2)).endless

    def test_an_iterator_of_it_is_one_shot(self, grain):
        assert not as_dataset(iter(self.source(grain))).restartable


HEAVY = {"tensorflow", "torch", "grain", "mlxtend", "jax", "rich", "ml_dtypes", "keras"}


def test_importing_the_room_loads_no_library():
    program = (
        "import sys\n"
        "import tailrace.data as data, numpy as np\n"
        "assert len(list(data.as_dataset(data.batches(np.zeros(4), 2)))) == 2\n"
        f"print(sorted({HEAVY!r} & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=600, check=True
    )
    assert done.stdout.strip() == "[]"


def test_no_file_of_the_room_imports_a_foreign_library():
    allowed_late = {"mlxtend", "rich", "ml_dtypes"}
    for file in Path(tailrace.data.__file__).parent.glob("*.py"):
        tree = ast.parse(file.read_text())
        imported = {
            name.split(".")[0]
            for node in ast.walk(tree)
            for name in (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else []
            )
        }
        assert not imported & (HEAVY - allowed_late), file.name


def test_the_table_asks_only_what_is_loaded(monkeypatch):
    def never(module, obj):
        raise AssertionError("asked although it is not loaded")

    monkeypatch.setitem(FOREIGN, "a_library_that_nobody_has", never)
    assert as_dataset([np.zeros(1)]).length == 1
