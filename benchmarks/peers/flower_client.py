"""The clients' half of the Flower benchmark, in a file that Ray's workers can import."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import torch
import torch_models
import work as works
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor
from torch.nn import functional as F


@lru_cache(maxsize=1)
def examples(folder: str, partition: str, clients: int) -> tuple[Tensor, Tensor]:
    """All clients' examples, read once in each actor."""
    torch.set_num_threads(1)
    x, y = works.deal(*works.mnist(Path(folder)), partition, clients)
    return torch.from_numpy(x), torch.from_numpy(y)


def train(model: torch.nn.Module, x: Tensor, y: Tensor, work: works.Work, lr: float) -> None:
    """Plain SGD in shuffled batches."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for _ in range(work.epochs):
        for rows in torch.randperm(len(y)).split(work.batch):
            loss = F.cross_entropy(model(x[rows]), y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def client_app(name: str, folder: str, partition: str, lr: float, in_script: bool = False) -> ClientApp:
    """An app whose clients each hold one part of MNIST.

    A client that is written in the script which starts the simulation travels to the actors with every message, and
    what it kept in the script's variables does not: `in_script` reads the data again for every message, to do the same.
    """
    app = ClientApp()
    work = works.WORKS[name]
    read = examples.__wrapped__ if in_script else examples

    @app.train()
    def fit(message: Message, context: Context) -> Message:
        x, y = read(folder, partition, work.clients)
        number = int(context.node_config["partition-id"])
        model = torch_models.build(name)
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        train(model, x[number], y[number], work, lr)
        answer = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": len(y[number])})}
        return Message(content=RecordDict(answer), reply_to=message)

    return app
