"""What cannot be captured is refused by a sentence; what is around a capture stays as it was."""

import random

import pytest
import torch
from eager import rows
from torch import nn

import tailrace as tr
import tailrace.torch as tt


class Case(nn.Module):
    """A linear layer, and what is done with it."""

    def __init__(self, function):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.hidden = torch.zeros(8, 4)
        self.calls = 0
        self.function = function

    def forward(self, x):
        return {"loss": self.function(self, self.linear(x)).mean()}


def branches(m, x):
    if x.sum() > 0:
        return x
    return -x


def reads(m, x):
    return x * x.max().item()


def selects(m, x):
    return x[x > 0]


def formats(m, x):
    m.text = f"{x.sum():.2f}"
    return x


def prints(m, x):
    print("a line")
    return x


def raises(m, x):
    raise ValueError("of the user's own")


def draws(m, x):
    return x * random.random()


def counts(m, x):
    m.calls += 1
    return x * m.calls


def keeps(m, x):
    m.hidden = x.detach() + m.hidden
    return x + m.hidden


def writes_a_parameter(m, x):
    with torch.no_grad():
        m.linear.bias.copy_(torch.ones(4))
    return x


def writes_outside(m, x):
    m.hidden.add_(x.detach())
    return x


def has_a_block(m, x):
    with tt.Block("first", device=0):
        return x * 2


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (
            branches,
            r"refusals.py:\d+ \(if x.sum\(\) > 0:\) branches on the value of a tensor.*where",
        ),
        (reads, r"refusals.py:\d+ reads the value of a tensor"),
        (selects, r"refusals.py:\d+ has a result whose shape depends on.*torch.where"),
        (formats, "reads what it computes, as in a text.*Return the tensor"),
        (prints, r"\(print\(\"a line\"\)\) prints"),
        (raises, "ValueError in forward: of the user's own .*refusals.py"),
        (draws, "draws from Python's random numbers.*torch.rand"),
        (counts, "changes the attribute 'calls' and computes with it.*register_buffer"),
        (keeps, "Attribute hidden is used and then reassigned"),
        (writes_a_parameter, "linear.bias|keeps no record"),
        (writes_outside, "into a tensor of the host, of shape .8, 4.*register_buffer"),
        (has_a_block, "calls tt.Block or tt.BeginBlock"),
    ],
)
def test_what_has_no_form_is_refused_by_a_sentence(function, text):
    case = Case(function)
    model = tt.training_model(case, None, "loss")
    with pytest.raises(tr.TailraceError, match=text):
        model(*rows(1)[0])
    # As before: no tensor of the capture is left behind.
    assert case.calls == 0
    assert torch.equal(case.hidden, torch.zeros(8, 4))


def test_both_reasons_are_said():
    model = tt.training_model(Case(branches))
    with pytest.raises(tr.TailraceError, match="cannot branch on the value") as raised:
        model(*rows(1)[0])
    assert any("branches on the value of a tensor" in note for note in raised.value.__notes__)


def test_an_operation_without_a_lowering_names_the_line():
    model = tt.training_model(Case(lambda m, x: torch.linalg.eigvals(x @ x.mT).real), None, "loss")
    with pytest.raises(tr.TailraceError, match="has no form that runs on the device"):
        model(*rows(1)[0])


def test_a_users_own_compiled_functions_and_settings_stay():
    compiled = []

    def backend(graph, _):
        compiled.append(graph)
        return graph.forward

    module = Case(lambda m, x: x.sin())
    theirs = torch.compile(Case(module.function), backend=backend)
    x = rows(1)[0][0]
    theirs(x)
    settings = torch._dynamo.config.get_config_copy()
    tt.training_model(module, None, "loss")(x)
    theirs(x)
    assert len(compiled) == 1
    assert torch._dynamo.config.get_config_copy() == settings


def test_many_models_of_one_class_train():
    limit = torch._dynamo.config.recompile_limit
    for width in range(1, limit + 3):
        module = nn.Sequential(nn.Linear(4, width), nn.Tanh())
        model = tt.training_model(module, None, lambda out: out.mean())
        model.compile(*rows(1)[0])
        assert model.is_compiled


def test_a_trace_leaves_pytorchs_compiler_as_it_was():
    # Tracing once replaced a function that PyTorch's compiler knows by identity.
    tt.training_model(Case(lambda m, x: x), None)(*rows(1)[0])
    found = torch.compile(lambda x: torch.vmap(torch.sin)(x), backend="eager", fullgraph=True)
    assert found(torch.zeros(2, 2)).shape == (2, 2)
