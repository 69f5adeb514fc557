"""What a call returns of the values that its steps make: all, the last, the sum, every n-th.

Written for PopTorch; only the import is another. Each anchor has its own mode.
"""

import torch
from digits_model import BasicLinearModel, digits

from tailrace.compat import poptorch


def main(batch_size=20, iterations=20):
    torch.manual_seed(0)
    opts = poptorch.Options()
    opts.deviceIterations(iterations)
    opts.outputMode(poptorch.OutputMode.All)
    bias, weight = "Gradient___model.fc2.bias", "UpdatedVar___model.fc2.weight"
    opts.anchorTensor("all", bias)
    opts.anchorTensor("final", bias, poptorch.OutputMode.Final)
    opts.anchorTensor("grad_bias", bias, anchor_mode=poptorch.OutputMode.Sum)
    opts.anchorTensor(
        "update_weight", weight, anchor_mode=poptorch.OutputMode.EveryN, anchor_return_period=10
    )
    loader = poptorch.DataLoader(opts, digits(), batch_size=batch_size, shuffle=True)
    model = poptorch.trainingModel(BasicLinearModel(), opts)
    output, loss = model(*next(iter(loader)))
    print(f"outputs {tuple(output.shape)}, losses {tuple(loss.shape)}")
    for name in ("all", "final", "grad_bias", "update_weight"):
        print(f"{name}: {tuple(model.getAnchoredTensor(name).shape)}")
    every = model.getAnchoredTensor("all").reshape(iterations, -1)
    close = torch.allclose(every.sum(0), model.getAnchoredTensor("grad_bias"), atol=1e-5)
    print("the sum is that of all:", close)
    print(
        "the last of all is the final one:",
        torch.equal(every[-1], model.getAnchoredTensor("final")),
    )


if __name__ == "__main__":
    main()
