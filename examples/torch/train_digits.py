"""Train on the device, many steps per call, with validation, checkpoints and a picture.

After each epoch the model is validated with the current weights and its state is saved (`model.load`
resumes from there). The run directory holds the norms of gradients, which are drawn as a heat map.
"""

import argparse
import pathlib
import tempfile

import torch
from digits_model import BasicLinearModel, digits

import tailrace as tr
import tailrace.torch as tt


def validate(predict):
    """Loss and accuracy on the test digits."""
    images, labels = digits("test").tensors
    scores = predict(images)
    loss = torch.nn.functional.nll_loss(scores, labels)
    return float(loss), float((scores.argmax(1) == labels).float().mean())


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=40)
    parser.add_argument("--device-iterations", type=int, default=50)
    parser.add_argument("--folder", help="for run directory, checkpoints and picture")
    arguments = parser.parse_args()
    folder = pathlib.Path(arguments.folder or tempfile.mkdtemp())
    torch.manual_seed(0)
    module = BasicLinearModel()
    module.log_softmax = torch.nn.LogSoftmax(dim=1)
    # A model has the mode that its module had when it was wrapped.
    predict = tt.inference_model(module.eval(), device_iterations=10)
    module.train()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.02, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, arguments.epochs)
    model = tt.training_model(
        module,
        optimizer,
        device_iterations=arguments.device_iterations,
        observe=[tr.Tap("grad/*.weight", mode="final", reduce="norm")],
        run_dir=folder / "run",
    )
    loader = tt.DataLoader(model, digits(), arguments.batch_size, shuffle=True)
    for epoch in range(arguments.epochs):
        for images, labels in loader:
            model(images, labels)
        schedule.step()
        loss, accuracy = validate(predict)
        print(f"epoch {epoch}: val_loss {loss:.4f}, accuracy {accuracy:.1%}")
        model.save(folder / f"epoch{epoch}.npz")
    print(f"loss {model.history.loss[-1]:.4f} after {model.history.steps[-1] + 1} steps")
    for name in model.records.names:
        if name.startswith("grad/"):
            print(f"  {name}: {model.records[name, 'norm'].values[-1]:.4f}")
    tr.open_run(folder / "run").heatmap("grad/*").save(folder / "gradients.png")
    print(f"see {folder}")


if __name__ == "__main__":
    main()
