"""A plain training script with checkpoints, which is killed and started again; it prints each call.

python resumed_script.py DIRECTORY OUT
"""

import os
import sys

import numpy as np
import torch
from torch import nn

import tailrace as tr
import tailrace.torch as tt

EPOCHS, ROWS, EACH = 4, 150, 2


class Noisy(torch.utils.data.Dataset):
    """Elements with random numbers of NumPy in them."""

    def __init__(self):
        generator = np.random.default_rng(0)
        self.x = generator.normal(size=(ROWS, 6)).astype(np.float32)

    def __len__(self):
        return ROWS

    def __getitem__(self, number):
        x = self.x[number] + 0.1 * np.random.normal(size=6).astype(np.float32)
        return x, self.x[number].sum(keepdims=True)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)

    def forward(self, x, y):
        x = nn.functional.dropout(torch.relu(self.norm(self.first(x))), 0.3)
        return nn.functional.mse_loss(self.last(x), y)


def main(directory, out, run_dir=None):
    torch.manual_seed(1)
    np.random.seed(2)
    module = Net()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    calls = EPOCHS * ROWS // 10
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=calls * EACH + 1)
    model = tt.training_model(
        module,
        optimizer,
        scheduler=scheduler,
        max_grad_norm=1.0,
        device_iterations=EACH,
        checkpoint=tr.Checkpoint(directory, every=3, keep=2) if directory else None,
        run_dir=run_dir,
    )
    loader = tt.DataLoader(model, Noisy(), batch_size=5, shuffle=True)
    losses = []
    start = model.resume() if directory else None
    print("start", start.epoch if start else 0, start.step if start else 0, flush=True)
    for _ in range(start.epoch if start else 0, EPOCHS):
        for x, y in loader:
            noise = 0.1 * torch.randn_like(x)  # of the loop itself
            losses.append(float(model(x + noise, y)))
            print("call", flush=True)
    state = {name: value.numpy() for name, value in module.state_dict().items()}
    momentum = [v["momentum_buffer"].numpy() for v in optimizer.state_dict()["state"].values()]
    rates = scheduler.get_last_lr(), scheduler.last_epoch
    np.savez(f"{out}.tmp.npz", *momentum, **state, rates=rates[0], epoch=rates[1], loss=losses)
    os.replace(f"{out}.tmp.npz", out)


if __name__ == "__main__":
    main(*sys.argv[1:])
