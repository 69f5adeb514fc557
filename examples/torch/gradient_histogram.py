"""A histogram of all gradients of a network, as a picture: do any underflow?

Written for PopTorch; the import is another, and the digits come without a download.
"""

import argparse

import torch
from digits_model import BasicLinearModel, digits

from tailrace.compat import poptorch

TENSORS = [
    "Gradient___model.fc1.weight",
    "Gradient___model.fc3.weight",
    "Gradient___model.fc2.bias",
    "Gradient___model.fc1.bias",
    "Gradient___model.fc3.bias",
    "Gradient___model.fc2.weight",
]


def train(batch_size):
    """One epoch; returns the gradients of its last step, flat."""
    opts = poptorch.Options()
    for t in TENSORS:
        opts.anchorTensor(t, t)
    train_loader = poptorch.DataLoader(opts, digits(), batch_size=batch_size, shuffle=True)
    model = BasicLinearModel()
    model.train()
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.01)
    poptorch_model = poptorch.trainingModel(model, options=opts, optimizer=optimizer)
    poptorch_model.compile(torch.zeros(batch_size, 1, 28, 28), torch.zeros(batch_size).long())
    print("tensor names:", len(poptorch_model.getTensorNames()))
    total_loss = 0.0
    predictions = []
    for data, labels in train_loader:
        output, loss = poptorch_model(data, labels)
        total_loss += loss
        predictions += output
    print(f"Loss: {total_loss.item():.4f}")
    return torch.cat([poptorch_model.getAnchoredTensor(t).flatten() for t in TENSORS])


def exponents(gradient):
    """log2 of the sizes; zeros are two to the left of everything else."""
    gradient = gradient.abs()
    idx = gradient != 0
    gradient[idx] = torch.log2(gradient[idx])
    gradient[~idx] = torch.min(gradient) - 2
    return gradient.numpy()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-size", type=int, default=1000)
    parser.add_argument("--picture", default="GradientHistogram.png")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    data = exponents(train(arguments.batch_size))

    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    _, axs = plt.subplots(tight_layout=True)
    axs.hist(data, bins=50)
    axs.set(title="Gradient Histogram", ylabel="Frequency", xlabel="log2 of the gradient")
    plt.savefig(arguments.picture)
    print(f"Saved histogram of {len(data)} gradients to {arguments.picture}")


if __name__ == "__main__":
    main()
