"""PyTorch's own classes: what Tailrace changes of them, and for how long."""

import subprocess
import sys

SCRIPT = """
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils import data

KINDS = [
    torch.Tensor, nn.Parameter, nn.Module, nn.Linear, nn.utils.clip_grad, torch.optim.Optimizer,
    torch.optim.AdamW, lr_scheduler.LRScheduler, data.DataLoader, torch.autograd.Function,
    torch.amp.GradScaler, torch.Generator,
]
# PyTorch itself wraps the step of a class when it makes the first optimizer of it.
torch.optim.AdamW(nn.Linear(1, 1).parameters())


def now():
    return {(kind.__name__, name): value for kind in KINDS for name, value in vars(kind).items()}


def differs():
    then, found = BEFORE, now()
    return sorted(key for key in then.keys() | found if then.get(key) is not found.get(key))


BEFORE = now()
import tailrace.torch as tt

print(differs())


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 1)

    def forward(self, x, y):
        return nn.functional.mse_loss(self.linear(x), y)


net = Net()
optimizer = torch.optim.AdamW(net.parameters())
scheduler = lr_scheduler.ExponentialLR(optimizer, 0.9)
model = tt.training_model(net, optimizer, scheduler=scheduler, max_grad_norm=1.0)
loader = tt.DataLoader(model, data.TensorDataset(torch.ones(8, 2), torch.ones(8, 1)), batch_size=4)
for batch in loader:
    model(*batch)
net.state_dict(), optimizer.state_dict()
print(differs())
model.destroy()
print(differs())
"""


def test_classes_of_pytorch_are_put_back():
    """While a model trains, reading `.grad` of a parameter says that it stays None; nothing else."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines() == ["[]", "[('Parameter', 'grad')]", "[]"], done.stderr
