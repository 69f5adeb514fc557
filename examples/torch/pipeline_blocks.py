"""A model on two devices: blocks say where each part lives, and microbatches flow through them."""

import argparse
import itertools

import torch
from digits_model import digits
from torch import nn

import tailrace as tr
import tailrace.torch as tt


class Convolutional(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3), nn.ReLU()
        )
        self.classifier = nn.Sequential(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(400, 10))
        self.loss = nn.CrossEntropyLoss()
        tt.BeginBlock(
            self.classifier, "classifier", device=1
        )  # everything before it is on device 0

    def forward(self, images, labels):
        out = self.classifier(self.features(images))
        return out, self.loss(out, labels)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    arguments = parser.parse_args()
    tr.configure(devices=2)
    torch.manual_seed(0)
    module = Convolutional()
    model = tt.training_model(
        module,
        torch.optim.Adam(module.parameters(), lr=0.003),
        accumulation=8,
        device_iterations=5,
        output_mode="all",
    )
    loader = tt.DataLoader(model, digits(), batch_size=25, shuffle=True)
    for _, (images, labels) in itertools.product(range(arguments.epochs), loader):
        out, loss = model(images, labels)
        right = (out.argmax(1) == labels).float().mean()
        print(
            f"steps {model.history.steps[0]:2}-{model.history.steps[-1]:2}: "
            f"loss {loss.mean():.3f}, right {right:.1%}"
        )
    print(tt.module_repr(module.classifier).splitlines()[0])


if __name__ == "__main__":
    main()
