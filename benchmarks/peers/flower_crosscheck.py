"""Federated averaging in Flower, on examples and initial weights from a file: the other side of `crosscheck.py`.

    python flower_crosscheck.py JOB.npz RESULT.json

The file holds `train_x_K`, `train_y_K`, `test_x`, `test_y`, `weight_L` and `bias_L` (client K, dense layer L) and
`settings`. Nothing here comes from fedloom: the model, the training loop and the averaging are torch's and Flower's.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
here = str(Path(__file__).resolve().parent)
os.environ["PYTHONPATH"] = os.pathsep.join(path for path in (here, os.environ.get("PYTHONPATH")) if path)

import numpy as np  # noqa: E402
import torch  # noqa: E402
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict  # noqa: E402
from flwr.clientapp import ClientApp  # noqa: E402
from flwr.serverapp import Grid, ServerApp  # noqa: E402
from flwr.serverapp.strategy import FedAvg  # noqa: E402
from flwr.simulation import run_simulation  # noqa: E402
from torch import nn  # noqa: E402


@lru_cache(maxsize=1)
def job(path: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The arrays and the settings, read once in each process."""
    torch.set_num_threads(1)
    with np.load(path) as file:
        settings = json.loads(str(file["settings"]))
        return {name: torch.from_numpy(file[name]) for name in file.files if name != "settings"}, settings


def initial(path: str) -> nn.Sequential:
    """Dense layers with ReLU between them, with the weights of the file."""
    arrays, _ = job(path)
    layers: list[nn.Module] = []
    for number in range(sum(name.startswith("weight_") for name in arrays)):
        weight = arrays[f"weight_{number}"]
        dense = nn.Linear(weight.shape[1], weight.shape[0])
        with torch.no_grad():
            dense.weight.copy_(weight)
            dense.bias.copy_(arrays[f"bias_{number}"])
        layers += [dense, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def train(model: nn.Module, x: torch.Tensor, y: torch.Tensor, settings: dict[str, Any], seed: int) -> None:
    """Some epochs of shuffled batches."""
    kinds = {
        "adam": lambda p: torch.optim.Adam(p, settings["lr"], eps=1e-7),
        "sgd": lambda p: torch.optim.SGD(p, settings["lr"]),
    }
    optimizer = kinds[settings["optimizer"]](model.parameters())
    generator = torch.Generator().manual_seed(seed)
    for _ in range(settings["epochs"]):
        for rows in torch.randperm(len(y), generator=generator).split(settings["batch"] or len(y)):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()


def client_app(path: str) -> ClientApp:
    """An app whose clients each hold one user's examples."""
    app = ClientApp()

    @app.train()
    def fit(message: Message, context: Context) -> Message:
        arrays, settings = job(path)
        number = int(context.node_config["partition-id"])
        x, y = arrays[f"train_x_{number}"], arrays[f"train_y_{number}"]
        model = initial(path)
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        round = int(message.content["config"]["server-round"])
        train(model, x, y, settings, seed=settings["seed"] * 1_000_003 + round * 1009 + number)
        metrics = MetricRecord({"num-examples": len(y)})
        answer = {"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}
        return Message(content=RecordDict(answer), reply_to=message)

    return app


class Strict(FedAvg):
    """FedAvg that ends the process when a client fails; Flower's own would continue without the update."""

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
        replies = list(replies)
        wrong = [reply.error.reason for reply in replies if reply.has_error()]
        if wrong or len(replies) != self.min_train_nodes:
            print(f"{len(replies)} of {self.min_train_nodes} clients answered. {' '.join(wrong[:1])}", file=sys.stderr)
            sys.stderr.flush()
            os._exit(1)
        return super().aggregate_train(server_round, replies)


def main() -> None:
    """All rounds, then the accuracies and the final weights."""
    path, out = sys.argv[1:]
    arrays, settings = job(path)
    model = initial(path)
    curve: list[float] = []
    server = ServerApp()

    @torch.no_grad()
    def watch(round: int, found: ArrayRecord) -> None:
        model.load_state_dict(found.to_torch_state_dict())
        if round:
            right = model(arrays["test_x"]).argmax(1) == arrays["test_y"]
            curve.append(right.double().mean().item())

    @server.main()
    def run(grid: Grid, context: Context) -> None:
        clients = settings["clients"]
        strategy = Strict(
            fraction_train=1.0, fraction_evaluate=0.0, min_train_nodes=clients, min_available_nodes=clients
        )
        strategy.start(
            grid=grid,
            initial_arrays=ArrayRecord(model.state_dict()),
            num_rounds=settings["rounds"],
            evaluate_fn=watch,
            timeout=3600,
        )

    run_simulation(
        server_app=server,
        client_app=client_app(path),
        num_supernodes=settings["clients"],
        backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}},
    )
    weights = [parameter.flatten().tolist() for parameter in model.parameters()]
    Path(out).write_text(json.dumps({"accuracy": curve, "weights": weights}))


if __name__ == "__main__":
    import flower_crosscheck  # by its name, so that Ray's workers find the same functions

    flower_crosscheck.main()
