"""FedAvg on MNIST in plain torch, without fedloom: how many rounds does an independent loop need?

    python benchmarks/plain_fedavg.py --data FOLDER --partition shards --seed 1

2NN, 100 clients, 10 a round, batch 10, one local epoch; the rounds until a test accuracy. Only the reading of files is
shared with the other benchmarks: partition, cohorts, batches, initial weights and averaging are this script's own.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent / "peers"))

from work import mnist, mnist_folder


def main() -> None:
    """Train until the target, and say when it was reached."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="folder with MNIST's idx files (or MNIST_DIR, or FEDLOOM_DATA)")
    parser.add_argument("--partition", choices=["iid", "shards", "slices"], default="shards")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--target", type=float, default=0.97)
    parser.add_argument("--most", type=int, default=1500, help="give up after this number of rounds")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    random = np.random.default_rng(options.seed)
    folder = mnist_folder(options.data)
    (x, y), (test_x, test_y) = (tuple(map(torch.from_numpy, mnist(folder, part))) for part in ("train", "t10k"))
    parts = deal(y, options.partition, random)
    shared, working = net(), net()
    for number in range(1, options.most + 1):
        total: dict[str, Tensor] = {}
        for client in random.choice(len(parts), 10, replace=False):
            working.load_state_dict(shared.state_dict())
            train(working, x[parts[client]], y[parts[client]], options.lr)
            for name, leaf in working.state_dict().items():
                total[name] = total.get(name, 0) + leaf / 10
        shared.load_state_dict(total)
        with torch.no_grad():
            accuracy = (shared(test_x).argmax(1) == test_y).float().mean().item()
        if number % 50 == 0:
            print(f"round {number}: {accuracy:.4f}", file=sys.stderr, flush=True)
        if accuracy >= options.target:
            print(f"{options.partition}, seed {options.seed}, lr {options.lr:g}: {number} rounds ({accuracy:.4f})")
            return
    print(f"{options.partition}, seed {options.seed}, lr {options.lr:g}: not in {options.most} rounds ({accuracy:.4f})")


def net() -> nn.Sequential:
    """The 2NN."""
    inside = [nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 10)]
    return nn.Sequential(nn.Flatten(), *inside)


def deal(y: Tensor, partition: str, random: np.random.Generator) -> np.ndarray:
    """600 images for each of 100 clients: at random, as two shards of 300 sorted by label, or as one slice."""
    if partition == "iid":
        return random.permutation(len(y)).reshape(100, 600)
    shards = np.argsort(y.numpy(), kind="stable").reshape(200, 300)
    return (shards[random.permutation(200)] if partition == "shards" else shards).reshape(100, 600)


def train(model: nn.Module, x: Tensor, y: Tensor, lr: float) -> None:
    """One epoch of plain SGD in shuffled batches of ten."""
    parameters = list(model.parameters())
    for rows in torch.randperm(len(y)).split(10):
        gradients = torch.autograd.grad(F.cross_entropy(model(x[rows]), y[rows]), parameters)
        with torch.no_grad():
            torch._foreach_add_(parameters, gradients, alpha=-lr)


if __name__ == "__main__":
    main()
