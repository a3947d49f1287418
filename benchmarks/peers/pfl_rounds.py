"""FedAvg rounds in pfl-research, on request: in one process, or in several with torch.distributed."""

from __future__ import annotations

from protocol import Line

LINE = Line()

import os  # noqa: E402
import socket  # noqa: E402
import subprocess  # noqa: E402
import sys  # noqa: E402

import work as works  # noqa: E402

PARSER = works.arguments(__doc__)
PARSER.add_argument("--threads", type=int, default=1, help="torch threads of each process")
PARSER.add_argument("--processes", type=int, default=1)
PARSER.add_argument("--plain-cell", action="store_true", help="the LSTM step by step instead of torch's kernel")
OPTIONS = PARSER.parse_args()


def follow(processes: int) -> list[subprocess.Popen[bytes]]:
    """Start the other processes, with the environment variables that torchrun would set."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(processes)}
    os.environ.update(common, TORCHELASTIC_RUN_ID="benchmark", RANK="0", LOCAL_RANK="0")
    return [
        subprocess.Popen(
            [sys.executable, *sys.argv],
            stdin=subprocess.DEVNULL,
            env={**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(1, processes)
    ]


# pfl joins its process group when it is imported: the others must have started by then
FOLLOWERS = follow(OPTIONS.processes) if OPTIONS.processes > 1 and "RANK" not in os.environ else []
RANK = int(os.environ.get("RANK", 0))

import torch  # noqa: E402
import torch_models  # noqa: E402
from pfl.aggregate.simulate import SimulatedBackend  # noqa: E402
from pfl.algorithm.base import NNAlgorithmParams  # noqa: E402
from pfl.algorithm.federated_averaging import FederatedAveraging  # noqa: E402
from pfl.callback.base import TrainingProcessCallback  # noqa: E402
from pfl.callback.central_evaluation import CentralEvaluationCallback  # noqa: E402
from pfl.data.dataset import Dataset  # noqa: E402
from pfl.data.federated_dataset import FederatedDataset  # noqa: E402
from pfl.data.sampling import MinimizeReuseUserSampler  # noqa: E402
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams  # noqa: E402
from pfl.metrics import Metrics, Weighted  # noqa: E402
from pfl.model.pytorch import PyTorchModel  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

ACCURACY = "Central val | accuracy"


class Trainable(nn.Module):
    """A module with the two methods that pfl requires."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self(x), y)

    @torch.no_grad()
    def metrics(self, x: Tensor, y: Tensor) -> dict[str, Weighted]:
        return {"accuracy": Weighted((self(x).argmax(1) == y).sum().item(), len(y))}


class OnOrder(TrainingProcessCallback):
    """Reports each round and sleeps until the next is wanted; further processes follow the first."""

    def wanted(self) -> bool:
        """Return whether there is another round."""
        go = torch.tensor(int(LINE.wait()) if RANK == 0 else 0)
        if OPTIONS.processes > 1:
            torch.distributed.broadcast(go, 0)
        return bool(go)

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        found = {str(name): value.overall_value for name, value in aggregate_metrics if str(name) == ACCURACY}
        if RANK == 0:
            LINE.done(**({"accuracy": found[ACCURACY]} if found else {}))
        return not self.wanted(), Metrics()


def main() -> None:
    """Load everything, say so, and run until the parent ends the run."""
    torch.set_num_threads(OPTIONS.threads)
    torch.manual_seed(OPTIONS.seed)
    work = works.WORKS[OPTIONS.work]
    users = load()
    net = Trainable(torch_models.build(OPTIONS.work, fused=not OPTIONS.plain_cell))
    model = PyTorchModel(net, torch.optim.SGD, torch.optim.SGD(net.parameters(), lr=1.0))
    sampler = MinimizeReuseUserSampler(list(range(work.clients)))
    federation = FederatedDataset(lambda user: Dataset(raw_data=users[user], user_id=str(user)), sampler)
    order = OnOrder()
    callbacks: list[TrainingProcessCallback] = []
    evaluation = NNEvalHyperParams(local_batch_size=1000)
    if OPTIONS.evaluate:
        test = [torch.from_numpy(part) for part in works.mnist(works.mnist_folder(OPTIONS.data), "t10k")]
        callbacks.append(CentralEvaluationCallback(Dataset(raw_data=test), evaluation))
    if RANK == 0:
        LINE.ready(
            parameters=sum(leaf.numel() for leaf in net.parameters()),
            threads=OPTIONS.threads,
            processes=OPTIONS.processes,
        )
    if order.wanted():
        FederatedAveraging().run(
            algorithm_params=NNAlgorithmParams(
                central_num_iterations=10**9,
                evaluation_frequency=10**9,
                train_cohort_size=work.cohort,
                val_cohort_size=0,
            ),
            backend=SimulatedBackend(training_data=federation, val_data=None),
            model=model,
            model_train_params=NNTrainHyperParams(
                local_num_epochs=work.epochs,
                local_learning_rate=OPTIONS.lr or work.lr,
                local_batch_size=work.batch,
            ),
            model_eval_params=evaluation,
            callbacks=[*callbacks, order],  # evaluation comes first, so that it is part of the round
            send_metrics_to_platform=False,
        )
    for follower in FOLLOWERS:
        follower.wait()


def load() -> list[list[Tensor]]:
    """Every user's examples and labels."""
    if OPTIONS.work == "lstm":
        pairs = works.sequences()
    else:
        images = works.mnist(works.mnist_folder(OPTIONS.data))
        clients = works.WORKS[OPTIONS.work].clients
        pairs = zip(*works.deal(*images, OPTIONS.partition, clients), strict=True)
    return [[torch.from_numpy(x), torch.from_numpy(y)] for x, y in pairs]


if __name__ == "__main__":
    main()
