"""FedAvg rounds in Flower's simulation, on request: one Ray actor with one torch thread per core."""

from __future__ import annotations

from protocol import Line

LINE = Line()

import os  # noqa: E402
import sys  # noqa: E402
from collections.abc import Iterable  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ["RAY_ADDRESS"] = "local"  # do not join a cluster that is already running on this machine
here = str(Path(__file__).resolve().parent)
os.environ["PYTHONPATH"] = os.pathsep.join(path for path in (here, os.environ.get("PYTHONPATH")) if path)

import torch  # noqa: E402
import torch_models  # noqa: E402
import work as works  # noqa: E402
from flower_client import client_app  # noqa: E402
from flwr.app import ArrayRecord, Context, Message  # noqa: E402
from flwr.serverapp import Grid, ServerApp  # noqa: E402
from flwr.serverapp.strategy import FedAvg  # noqa: E402
from flwr.simulation import run_simulation  # noqa: E402


class Strict(FedAvg):
    """FedAvg that ends the process when a client fails; Flower's own would continue, and look fast."""

    expected = 0

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
        replies = list(replies)
        wrong = [reply.error.reason for reply in replies if reply.has_error()]
        if wrong or len(replies) != self.expected:
            print(f"{len(replies)} of {self.expected} clients answered. {' '.join(wrong[:1])}", file=sys.stderr)
            sys.stderr.flush()
            os._exit(1)
        return super().aggregate_train(server_round, replies)


def main() -> None:
    """Load everything, say so, and run until the parent ends the run."""
    parser = works.arguments(__doc__)
    parser.add_argument("--in-script", action="store_true", help="clients that keep nothing, as if written in here")
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
            os._exit(0)  # a simulation cannot be stopped from inside; the parent ends the processes that Ray started

    @server.main()
    def serve(grid: Grid, context: Context) -> None:
        strategy = Strict(
            fraction_train=work.cohort / work.clients,
            fraction_evaluate=0.0,
            min_train_nodes=work.cohort,
            min_available_nodes=work.clients,
        )
        strategy.expected = work.cohort
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
        client_app=client_app(
            options.work, str(folder), options.partition, options.lr or work.lr, in_script=options.in_script
        ),
        num_supernodes=work.clients,
        backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}},
    )


if __name__ == "__main__":
    main()
