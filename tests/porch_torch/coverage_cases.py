"""Layers and losses of PyTorch, each with inputs: what the coverage table of the guide lists."""

import torch
from torch import nn


def floats(*shape):
    return torch.randn(*shape)


def ids(high, *shape):
    return torch.randint(0, high, shape)


def positive(*shape):
    return torch.rand(*shape) + 0.1


class Attention(nn.Module):
    """Self-attention that returns the values only; weights are a second output of the layer."""

    def __init__(self, **options):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True, **options)

    def forward(self, x):
        out, weights = self.attention(x, x, x)
        return out, weights


def _sequences():
    return floats(3, 5, 4)


LAYERS = {
    "Linear": (lambda: nn.Linear(4, 3), lambda: [floats(5, 4)]),
    "Bilinear": (lambda: nn.Bilinear(3, 4, 2), lambda: [floats(5, 3), floats(5, 4)]),
    "Identity": (nn.Identity, lambda: [floats(5, 4)]),
    "Flatten": (nn.Flatten, lambda: [floats(2, 3, 4)]),
    "Unflatten": (lambda: nn.Unflatten(1, (2, 3)), lambda: [floats(4, 6)]),
    "Embedding": (lambda: nn.Embedding(7, 3, padding_idx=0), lambda: [ids(7, 2, 5)]),
    "EmbeddingBag": (lambda: nn.EmbeddingBag(7, 3, mode="mean"), lambda: [ids(7, 2, 5)]),
    "Conv1d": (lambda: nn.Conv1d(3, 4, 3, stride=2, padding=1), lambda: [floats(2, 3, 9)]),
    "Conv2d": (
        lambda: nn.Conv2d(4, 6, 3, padding=1, groups=2, dilation=2),
        lambda: [floats(2, 4, 9, 9)],
    ),
    "Conv3d": (lambda: nn.Conv3d(2, 3, 2), lambda: [floats(2, 2, 4, 4, 4)]),
    "ConvTranspose1d": (lambda: nn.ConvTranspose1d(3, 4, 3, stride=2), lambda: [floats(2, 3, 5)]),
    "ConvTranspose2d": (
        lambda: nn.ConvTranspose2d(3, 4, 3, stride=2, padding=1, output_padding=1),
        lambda: [floats(2, 3, 5, 5)],
    ),
    "ConvTranspose3d": (lambda: nn.ConvTranspose3d(2, 3, 2), lambda: [floats(1, 2, 3, 3, 3)]),
    "BatchNorm1d": (lambda: nn.BatchNorm1d(4), lambda: [floats(6, 4)]),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(3), lambda: [floats(2, 3, 4, 4)]),
    "BatchNorm3d": (lambda: nn.BatchNorm3d(2), lambda: [floats(2, 2, 3, 3, 3)]),
    "LayerNorm": (lambda: nn.LayerNorm((3, 4)), lambda: [floats(2, 3, 4)]),
    "RMSNorm": (lambda: nn.RMSNorm(4), lambda: [floats(2, 3, 4)]),
    "GroupNorm": (lambda: nn.GroupNorm(2, 4), lambda: [floats(2, 4, 3)]),
    "InstanceNorm1d": (lambda: nn.InstanceNorm1d(3, affine=True), lambda: [floats(2, 3, 5)]),
    "InstanceNorm2d": (lambda: nn.InstanceNorm2d(3, affine=True), lambda: [floats(2, 3, 4, 4)]),
    "LocalResponseNorm": (lambda: nn.LocalResponseNorm(2), lambda: [floats(2, 4, 5, 5)]),
    "LSTM": (lambda: nn.LSTM(4, 3, num_layers=2, batch_first=True), lambda: [_sequences()]),
    "LSTM (bidirectional)": (lambda: nn.LSTM(4, 3, bidirectional=True), lambda: [_sequences()]),
    "GRU": (lambda: nn.GRU(4, 3, num_layers=2), lambda: [_sequences()]),
    "RNN": (lambda: nn.RNN(4, 3), lambda: [_sequences()]),
    "LSTMCell": (lambda: nn.LSTMCell(4, 3), lambda: [floats(5, 4)]),
    "GRUCell": (lambda: nn.GRUCell(4, 3), lambda: [floats(5, 4)]),
    "RNNCell": (lambda: nn.RNNCell(4, 3), lambda: [floats(5, 4)]),
    "MultiheadAttention": (Attention, lambda: [floats(2, 5, 8)]),
    "TransformerEncoderLayer": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
        lambda: [floats(2, 5, 8)],
    ),
    "TransformerEncoder": (
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
            2,
            enable_nested_tensor=False,
        ),
        lambda: [floats(2, 5, 8)],
    ),
    "TransformerDecoderLayer": (
        lambda: nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
        lambda: [floats(2, 5, 8), floats(2, 4, 8)],
    ),
    "Transformer": (
        lambda: nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True),
        lambda: [floats(2, 5, 8), floats(2, 4, 8)],
    ),
    "MaxPool1d": (lambda: nn.MaxPool1d(2), lambda: [floats(2, 3, 8)]),
    "MaxPool2d": (lambda: nn.MaxPool2d(3, stride=2, padding=1), lambda: [floats(2, 3, 8, 8)]),
    "MaxPool3d": (lambda: nn.MaxPool3d(2), lambda: [floats(1, 2, 4, 4, 4)]),
    "AvgPool1d": (lambda: nn.AvgPool1d(2), lambda: [floats(2, 3, 8)]),
    "AvgPool2d": (lambda: nn.AvgPool2d(3, stride=2, padding=1), lambda: [floats(2, 3, 8, 8)]),
    "AvgPool3d": (lambda: nn.AvgPool3d(2), lambda: [floats(1, 2, 4, 4, 4)]),
    "AdaptiveAvgPool1d": (lambda: nn.AdaptiveAvgPool1d(3), lambda: [floats(2, 3, 9)]),
    "AdaptiveAvgPool2d": (lambda: nn.AdaptiveAvgPool2d((2, 3)), lambda: [floats(2, 3, 7, 8)]),
    "AdaptiveMaxPool1d": (lambda: nn.AdaptiveMaxPool1d(3), lambda: [floats(2, 3, 7)]),
    "AdaptiveMaxPool2d": (lambda: nn.AdaptiveMaxPool2d((2, None)), lambda: [floats(2, 3, 7, 5)]),
    "AdaptiveMaxPool3d": (lambda: nn.AdaptiveMaxPool3d(2), lambda: [floats(1, 2, 4, 5, 4)]),
    "FractionalMaxPool2d": (
        lambda: nn.FractionalMaxPool2d(
            (2, 3), output_size=(3, 4), _random_samples=positive(2, 3, 2) % 1
        ),
        lambda: [floats(2, 3, 8, 9)],
    ),
    "FractionalMaxPool3d": (
        lambda: nn.FractionalMaxPool3d(2, output_ratio=0.5, _random_samples=positive(1, 2, 3) % 1),
        lambda: [floats(1, 2, 6, 7, 8)],
    ),
    "LPPool2d": (lambda: nn.LPPool2d(2, 2), lambda: [positive(2, 3, 4, 4)]),
    "Upsample (nearest)": (lambda: nn.Upsample(scale_factor=2), lambda: [floats(2, 3, 4, 4)]),
    "Upsample (bilinear)": (
        lambda: nn.Upsample(scale_factor=2, mode="bilinear"),
        lambda: [floats(2, 3, 4, 4)],
    ),
    "PixelShuffle": (lambda: nn.PixelShuffle(2), lambda: [floats(2, 8, 3, 3)]),
    "ZeroPad2d": (lambda: nn.ZeroPad2d(1), lambda: [floats(2, 3, 4, 4)]),
    "ReflectionPad2d": (lambda: nn.ReflectionPad2d(1), lambda: [floats(2, 3, 4, 4)]),
    "ReplicationPad2d": (lambda: nn.ReplicationPad2d(1), lambda: [floats(2, 3, 4, 4)]),
    "CosineSimilarity": (nn.CosineSimilarity, lambda: [floats(3, 4), floats(3, 4)]),
    "PairwiseDistance": (nn.PairwiseDistance, lambda: [floats(3, 4), floats(3, 4)]),
    "Dropout (eval)": (lambda: nn.Dropout(0.5).eval(), lambda: [floats(3, 4)]),
}
"""name: (module, inputs)."""

for _name, _options in {
    "ReLU": {},
    "ReLU6": {},
    "LeakyReLU": {},
    "PReLU": {},
    "ELU": {},
    "SELU": {},
    "CELU": {},
    "GELU": {},
    "SiLU": {},
    "Mish": {},
    "Sigmoid": {},
    "LogSigmoid": {},
    "Hardsigmoid": {},
    "Hardswish": {},
    "Hardtanh": {},
    "Tanh": {},
    "Tanhshrink": {},
    "Softplus": {},
    "Softsign": {},
    "Softshrink": {},
    "Hardshrink": {},
    "Softmax": {"dim": -1},
    "LogSoftmax": {"dim": -1},
    "Softmin": {"dim": -1},
    "GLU": {},
    "Threshold": {"threshold": 0.1, "value": 20.0},
}.items():
    LAYERS[_name] = (
        lambda name=_name, options=_options: getattr(nn, name)(**options),
        lambda: [floats(4, 6)],
    )

CLASSES, MULTI = lambda: ids(4, 5), lambda: ids(2, 5, 4).float()

LOSSES = {
    "L1Loss": (nn.L1Loss, lambda: [floats(5, 3), floats(5, 3)]),
    "MSELoss": (nn.MSELoss, lambda: [floats(5, 3), floats(5, 3)]),
    "SmoothL1Loss": (nn.SmoothL1Loss, lambda: [floats(5, 3), floats(5, 3)]),
    "HuberLoss": (nn.HuberLoss, lambda: [floats(5, 3), floats(5, 3)]),
    "CrossEntropyLoss": (
        lambda: nn.CrossEntropyLoss(label_smoothing=0.1),
        lambda: [floats(5, 4), CLASSES()],
    ),
    "CrossEntropyLoss (weight, ignore_index)": (
        lambda: nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0, 4.0]), ignore_index=1),
        lambda: [floats(5, 4), CLASSES()],
    ),
    "CrossEntropyLoss (probabilities)": (
        nn.CrossEntropyLoss,
        lambda: [floats(5, 4), torch.softmax(floats(5, 4), 1)],
    ),
    "NLLLoss": (nn.NLLLoss, lambda: [torch.log_softmax(floats(5, 4), 1), CLASSES()]),
    "BCELoss": (nn.BCELoss, lambda: [torch.sigmoid(floats(5, 4)), MULTI()]),
    "BCEWithLogitsLoss": (nn.BCEWithLogitsLoss, lambda: [floats(5, 4), MULTI()]),
    "KLDivLoss": (
        lambda: nn.KLDivLoss(reduction="batchmean"),
        lambda: [torch.log_softmax(floats(5, 4), 1), torch.softmax(floats(5, 4), 1)],
    ),
    "PoissonNLLLoss": (nn.PoissonNLLLoss, lambda: [floats(5, 3), positive(5, 3)]),
    "GaussianNLLLoss": (
        nn.GaussianNLLLoss,
        lambda: [floats(5, 3), floats(5, 3), positive(5, 3)],
    ),
    "HingeEmbeddingLoss": (
        nn.HingeEmbeddingLoss,
        lambda: [floats(5, 3), ids(2, 5, 3) * 2 - 1],
    ),
    "CosineEmbeddingLoss": (
        nn.CosineEmbeddingLoss,
        lambda: [floats(5, 3), floats(5, 3), ids(2, 5) * 2 - 1],
    ),
    "MarginRankingLoss": (
        nn.MarginRankingLoss,
        lambda: [floats(5), floats(5), ids(2, 5) * 2 - 1],
    ),
    "MultiMarginLoss": (nn.MultiMarginLoss, lambda: [floats(5, 4), CLASSES()]),
    "MultiLabelSoftMarginLoss": (nn.MultiLabelSoftMarginLoss, lambda: [floats(5, 4), MULTI()]),
    "SoftMarginLoss": (nn.SoftMarginLoss, lambda: [floats(5, 4), MULTI() * 2 - 1]),
    "TripletMarginLoss": (
        nn.TripletMarginLoss,
        lambda: [floats(5, 4), floats(5, 4), floats(5, 4)],
    ),
    "MultiLabelMarginLoss": (
        nn.MultiLabelMarginLoss,
        lambda: [floats(2, 4), torch.tensor([[3, 0, -1, 1], [1, -1, 0, 0]])],
    ),
    "CTCLoss": (
        nn.CTCLoss,
        lambda: [
            torch.log_softmax(floats(6, 2, 5), 2),
            ids(4, 2, 3) + 1,
            torch.tensor([6, 6]),
            torch.tensor([3, 2]),
        ],
    ),
}
"""name: (module, inputs)."""

LOSSES["AdaptiveLogSoftmaxWithLoss"] = (
    lambda: nn.AdaptiveLogSoftmaxWithLoss(16, 6, [2, 4]),
    lambda: [floats(3, 16), ids(6, 3)],
)

REFUSED = {
    "AdaptiveLogSoftmaxWithLoss": "Python cannot (look at|branch on) the value of a tensor",
}
"""What does not work: name, and a part of the sentence that says so."""
