"""FedAvg rounds in Flower's simulation, on order: one Ray actor with one torch thread per core."""

from __future__ import annotations

from protocol import Line

LINE: Line | None = None
if __name__ == "__main__":  # Ray's workers load this file too, and their stdout is Ray's
    LINE = Line()

import os  # noqa: E402
import time  # noqa: E402
from functools import lru_cache  # noqa: E402
from pathlib import Path  # noqa: E402

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")

import torch  # noqa: E402
import torch_models  # noqa: E402
import work as works  # noqa: E402
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict  # noqa: E402
from flwr.clientapp import ClientApp  # noqa: E402
from flwr.serverapp import Grid, ServerApp  # noqa: E402
from flwr.serverapp.strategy import FedAvg  # noqa: E402
from flwr.simulation import run_simulation  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.nn import functional as F  # noqa: E402


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


def client_app(name: str, folder: str, partition: str, lr: float) -> ClientApp:
    """The clients' half."""
    app = ClientApp()
    work = works.WORKS[name]

    @app.train()
    def fit(message: Message, context: Context) -> Message:
        x, y = examples(folder, partition, work.clients)
        number = int(context.node_config["partition-id"])
        model = torch_models.build(name)
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        train(model, x[number], y[number], work, lr)
        answer = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": len(y[number])})}
        return Message(content=RecordDict(answer), reply_to=message)

    return app


def main() -> None:
    """Load everything, say so, and run until the parent has had enough."""
    parser = works.arguments(__doc__)
    options = parser.parse_args()
    if options.work == "lstm":
        raise SystemExit("the LSTM is not written for Flower")
    work = works.WORKS[options.work]
    folder = works.mnist_folder(options.data)
    torch.manual_seed(options.seed)
    model = torch_models.build(options.work)
    test = [torch.from_numpy(part) for part in works.mnist(folder, "t10k")] if options.evaluate else []
    server = ServerApp()

    @torch.no_grad()
    def on_order(round: int, arrays: ArrayRecord) -> None:
        """Called after every round, and once before the first: the place to stop the clock and to sleep."""
        found = {}
        if test and round:
            model.load_state_dict(arrays.to_torch_state_dict())
            parts = zip(*(part.split(1000) for part in test), strict=True)
            right = sum((model.eval()(x).argmax(1) == y).sum().item() for x, y in parts)
            found = {"accuracy": right / len(test[1])}
        if round:
            LINE.done(**found)
        if not LINE.wait():
            time.sleep(0.1)
            os._exit(0)  # a simulation cannot be told to stop; the parent ends what Ray has started

    @server.main()
    def serve(grid: Grid, context: Context) -> None:
        strategy = FedAvg(
            fraction_train=work.cohort / work.clients,
            fraction_evaluate=0.0,
            min_train_nodes=work.cohort,
            min_available_nodes=work.clients,
        )
        LINE.ready(parameters=sum(leaf.numel() for leaf in model.parameters()))
        strategy.start(
            grid=grid,
            initial_arrays=ArrayRecord(model.state_dict()),
            num_rounds=10**6,
            evaluate_fn=on_order,
            timeout=3600,
        )

    run_simulation(
        server_app=server,
        client_app=client_app(options.work, str(folder), options.partition, options.lr or work.lr),
        num_supernodes=work.clients,
        backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}},
    )


if __name__ == "__main__":
    main()
