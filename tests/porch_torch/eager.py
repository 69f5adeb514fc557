"""Training a captured module, and the same in eager PyTorch."""

import torch
from small_modules import seeded

import tailrace.torch as tt
from oracles import assert_close


def arrays(module):
    """The weights and buffers of a module."""
    return {
        name: value.detach().float().numpy() if value.is_floating_point() else value.numpy()
        for name, value in module.state_dict().items()
    }


def same_as_eager(make, batches, loss="loss", of=lambda out: out["loss"], lr=0.1, **options):
    """Train on each batch in turn, captured and in eager; losses, weights and buffers must agree.

    Returns:
        the model, and the latest output of both.
    """
    module, plain = seeded(make)
    model = tt.training_model(module, torch.optim.SGD(module.parameters(), lr=lr), loss, **options)
    optimizer = torch.optim.SGD(plain.parameters(), lr=lr)
    for batch in batches:
        out = model(*(tensor.clone() for tensor in batch))
        optimizer.zero_grad()
        expected = plain(*(tensor.clone() for tensor in batch))
        of(expected).backward()
        optimizer.step()
        assert_close(of(out).detach().numpy(), of(expected).detach().numpy())
    model.copy_weights_to_host()
    assert_close(
        {k: v.astype("float32") for k, v in arrays(module).items()},
        {k: v.astype("float32") for k, v in arrays(plain).items()},
    )
    return model, out, expected


def rows(count=3, features=4, batch=8):
    """Batches of normal numbers."""
    torch.manual_seed(1)
    return [(torch.randn(batch, features),) for _ in range(count)]
