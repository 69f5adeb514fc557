"""The model and the data that the examples here share."""

import torch
import torch.nn as nn

import tailrace as tr


class BasicLinearModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(784, 320)
        self.fc2 = nn.Linear(320, 100)
        self.fc3 = nn.Linear(100, 10)
        self.log_softmax = nn.LogSoftmax(dim=0)
        self.loss = nn.NLLLoss()
        self.relu = nn.ReLU()

    def forward(self, x, labels=None):
        x = torch.flatten(x, start_dim=1)
        x = self.relu(self.fc1(x))
        x = self.relu(self.fc2(x))
        x = self.log_softmax(self.fc3(x))
        if self.training:
            return x, self.loss(x, labels)
        return x


def digits(split="train"):
    """Handwritten digits as a PyTorch dataset: images [1, 28, 28] in [-1, 1], and labels."""
    images, labels = tr.data.digits(split, dtype="float32")
    pixels = (torch.from_numpy(images)[:, None] - 0.5) / 0.5
    return torch.utils.data.TensorDataset(pixels, torch.from_numpy(labels).long())
