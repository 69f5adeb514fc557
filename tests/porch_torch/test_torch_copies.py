"""Copies of tensors within forward, by `copy` and `pickle`."""

import copy
import io
import pickle

import pytest
import torch
from small_modules import Call
from torch import nn

import tailrace as tr
import tailrace.torch as tt
from oracles import assert_close


class Copying(nn.Module):
    """Copies of inputs, parameters, buffers and containers, some of them written afterwards."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.register_buffer("mean", torch.ones(3))

    def forward(self, x, y):
        deep = copy.deepcopy(x)
        deep.add_(1)
        row = copy.deepcopy(x[0])
        row.zero_()
        made = torch.zeros(2, device="cpu")
        made[0] = x.sum()
        both = copy.deepcopy({"x": x, "again": [x, made], "host": torch.ones(2)})
        both["x"].mul_(2)
        weight = copy.deepcopy(self.linear.weight)
        twin = copy.deepcopy(self.linear)
        shared = copy.copy(self.mean)
        shared.add_(deep.mean(0))
        out = self.linear(x)
        # No gradient goes through a copy, whether deep or not.
        cut = copy.copy(out) * 3 + x @ weight.t() + twin(x)
        loss = nn.functional.mse_loss(out + cut, y)
        kinds = isinstance(weight, nn.Parameter), weight.requires_grad, out.requires_grad
        return deep, row, both, shared.clone(), kinds, loss


def test_copies_train_as_in_pytorch():
    found = []
    for wrapped in (False, True):
        torch.manual_seed(0)
        module = Copying()
        optimizer = torch.optim.SGD(module.parameters(), 0.1)
        model = tt.training_model(module, optimizer) if wrapped else module
        results = []
        for seed in range(3):
            torch.manual_seed(seed)
            *out, loss = model(torch.randn(4, 3), torch.randn(4, 2))
            if not wrapped:
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            results.append([*out, loss.detach()])
        found.append((results, dict(module.state_dict())))
    mine, theirs = (
        torch.utils._pytree.tree_map(lambda v: v.numpy() if isinstance(v, torch.Tensor) else v, one)
        for one in found
    )
    assert_close(theirs, mine)
    both = found[1][0][0][2]
    assert torch.equal(both["x"], both["again"][0])


def test_a_deep_copy_of_what_has_a_gradient_is_refused():
    class Copied(nn.Linear):
        def forward(self, x):
            return nn.functional.mse_loss(copy.deepcopy(super().forward(x)), x)

    with pytest.raises(RuntimeError, match="graph leaves"):
        Copied(2, 2)(torch.ones(2, 2))
    with pytest.raises(tr.TailraceError, match=r"deepcopy copies inputs.*x\.clone\(\)"):
        tt.training_model(Copied(2, 2))(torch.ones(2, 2))


@pytest.mark.parametrize("save", [pickle.dumps, lambda x: torch.save({"x": x}, io.BytesIO())])
def test_pickling_says_when_values_are_there(save):
    with pytest.raises(tr.TailraceError, match="cannot be pickled.*save what the call gives"):
        tt.inference_model(Call(lambda x: save(x)))(torch.ones(2))
