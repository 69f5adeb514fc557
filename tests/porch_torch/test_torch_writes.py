"""What forward writes into tensors: numbers and masks, in the dtype that the tensor has."""

import pytest
import torch
from small_modules import Call

import tailrace as tr
import tailrace.torch as tt
from oracles import assert_close

DTYPES = (torch.uint8, torch.int8, torch.int64, torch.bool, torch.float16)

MASK = [True, False, True, False]


def item(key, value):
    """`x[key] = value`, as a function; a tensor where a function is given."""

    def write(x):
        x[key() if callable(key) else key] = value() if callable(value) else value

    return write


WRITES = {
    "a number": item(1, 3.7),
    "a negative number by a mask": item(lambda: torch.tensor(MASK), 2.5),
    "by a list": item([0, 2], True),
    "floats that do not fit": item(slice(0, 2), lambda: torch.tensor([-1.5, 300.0])),
    "one float that does not fit": item(0, lambda: torch.tensor(-1.5)),
    "whole numbers that do not fit": item(slice(0, 2), lambda: torch.tensor([-1, 300])),
    "everywhere": item(..., lambda: torch.tensor(260.0)),
    "fill_": lambda x: x.fill_(torch.tensor(-3.5)),
    "fill_ a part": lambda x: x[1:3].fill_(torch.tensor(260.5)),
    "copy_": lambda x: x.copy_(torch.tensor([-1.5, 300.0, 2.5, 100.0])),
    "masked_fill_": lambda x: x.masked_fill_(torch.tensor(MASK), -1),
    "index_fill_": lambda x: x.index_fill_(0, torch.tensor([0, 2]), -1),
    "scatter_": lambda x: x.scatter_(0, torch.tensor([0, 2]), 1.5),
    "where": lambda x: x.copy_(torch.where(x > 2, x, -1)),
}


def test_tensors_keep_their_dtype():
    def forward(*given):
        made = []
        for x in given:
            for write in WRITES.values():
                made.append(x.clone())
                write(made[-1])
        return made

    given = [torch.arange(1, 5).to(dtype) for dtype in DTYPES]
    found, expected = tt.inference_model(Call(forward))(*given), forward(*given)
    names = [f"{name} into {dtype}" for dtype in DTYPES for name in WRITES]
    for name, one, other in zip(names, found, expected, strict=True):
        assert one.dtype == (torch.int32 if other.dtype == torch.int64 else other.dtype), name
        assert one.tolist() == other.tolist(), name


REFUSED = {
    "set": (lambda x: x.__setitem__(0, 300), "without overflow"),
    "set a float": (lambda x: x.__setitem__(0, -1.5), "without overflow"),
    "fill_": (lambda x: x.fill_(300.5), "without overflow"),
    "masked_fill": (lambda x: x.masked_fill(x > 2, 256), "without overflow"),
    "full_like": (lambda x: torch.full_like(x, 300), "without overflow"),
    "pad": (lambda x: torch.nn.functional.pad(x, (1, 1), value=300.0), "without overflow"),
    "add_": (lambda x: x.add_(1.5), "can't be cast to the desired output type"),
    "/=": (lambda x: x.__itruediv__(2), "can't be cast to the desired output type"),
    "clamp_": (lambda x: x.clamp_(min=0.5), "can't be cast to the desired output type"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_numbers_that_pytorch_refuses(name):
    write, text = REFUSED[name]
    x = torch.arange(4, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match=text):
        write(x.clone())
    with pytest.raises(tr.TailraceError, match=text):
        tt.inference_model(Call(lambda x: write(x.clone())))(x)


def test_masks_anywhere_in_a_key():
    keys = [
        (lambda rows, columns: (slice(None), columns), 5.0),
        (lambda rows, columns: (..., columns), 5.0),
        (lambda rows, columns: (1, columns), 5.0),
        (lambda rows, columns: (rows, 0), 5.0),
        (lambda rows, columns: (rows, slice(0, 2)), torch.tensor([1.0, 2.0])),
        (lambda rows, columns: (slice(0, 2), columns), torch.tensor([[6.0], [7.0]])),
        (lambda rows, columns: rows, torch.arange(4.0)),
        (lambda rows, columns: rows[:, None] & columns, torch.tensor(9.0)),
        (lambda rows, columns: (None, rows), 5.0),
    ]

    def forward(x, deep, rows, columns):
        made = []
        for key, value in keys:
            made.append(x.clone())
            made[-1][key(rows, columns)] = value
        # Through a slice, and in the middle of more dims.
        made.append(x.clone())
        made[-1][0][columns] = 7.0
        made.append(deep.clone())
        made[-1][:, rows[:, None] & columns, 1] = torch.tensor([[3.0], [4.0]])
        made.append(deep.clone())
        made[-1][..., rows[:, None] & columns, :] = torch.tensor([8.0, 9.0])
        return made

    x, deep = torch.randn(3, 4), torch.randn(2, 3, 4, 2)
    given = (x, deep, torch.tensor([True, False, True]), torch.tensor(MASK))
    found = tt.inference_model(Call(forward))(*given)
    assert_close([one.numpy() for one in found], [one.numpy() for one in forward(*given)])


def test_a_value_for_each_entry_of_a_mask_among_slices():
    def forward(x, mask):
        x = x.clone()
        x[:, mask] = torch.arange(6.0).reshape(3, 2)
        return x

    given = torch.zeros(3, 4), torch.tensor(MASK)
    assert torch.equal(tt.inference_model(Call(forward))(*given), forward(*given))
