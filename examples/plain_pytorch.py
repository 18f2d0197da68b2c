"""A Distiller in a plain PyTorch loop: your data set, your networks, your optimiser. `python examples/plain_pytorch.py`"""

import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

import letkd


def digits(n: int) -> TensorDataset:
    x, y = load_digits(return_X_y=True)
    x = torch.tensor(x[:n], dtype=torch.float32).reshape(-1, 1, 8, 8) / 8 - 1
    return TensorDataset(x.expand(-1, 3, -1, -1).repeat_interleave(2, dim=2).repeat_interleave(2, dim=3), torch.tensor(y[:n]))


def train(distiller: letkd.Distiller, loader: DataLoader, epochs: int) -> torch.nn.Module:
    optimizer = torch.optim.SGD(distiller.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(epochs):
        distiller.train()
        for batch in loader:  # (x, y), as from any loader
            step = distiller(batch)
            optimizer.zero_grad()
            step.loss.backward()
            optimizer.step()
        print(f"epoch {epoch + 1}: " + ", ".join(f"{name} {term.item():.3f}" for name, term in step.terms.items()))
    return distiller.export()  # the student alone, in eval mode


def main(epochs: int = 3, n: int = 1000) -> float:
    loader, (x, y) = DataLoader(digits(n), batch_size=50, shuffle=True), digits(2000)[n:]
    teacher = train(letkd.Distiller(letkd.create_model("resnet14_tiny", num_classes=10)), loader, epochs)
    student = letkd.create_model("resnet8_tiny", num_classes=10)
    distiller = letkd.Distiller(student, teacher, letkd.methods.letkd1(K=64)).fit(loader)
    model = train(distiller, loader, epochs)
    with torch.no_grad():
        return (model(x).argmax(dim=1) == y).float().mean().item()


if __name__ == "__main__":
    torch.manual_seed(0)
    print(f"accuracy on images it has not seen: {100 * main():.1f} %")
