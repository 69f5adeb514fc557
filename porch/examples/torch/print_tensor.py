"""Look at a tensor while a model trains: it is printed when it is made, its gradient when that is.

Written for PopTorch; only the import is another.
"""

import torch
import torch.nn as nn

from tailrace.compat import poptorch


class BasicLinearModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(10, 2)
        self.loss = nn.MSELoss()

    def forward(self, x, target):
        x = self.linear(x)
        # Go on with what is returned: it is the tensor that is printed.
        x_returned = poptorch.ipu_print_tensor(x, "linear")
        return x_returned, self.loss(x_returned, target)


def main():
    torch.manual_seed(0)
    model = poptorch.trainingModel(BasicLinearModel())
    out, loss = model(torch.rand(2, 10), torch.zeros(2, 2))
    print(f"returned: {tuple(out.shape)}, loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
