"""FedAvg rounds in FedJAX, on request: compiled for one device, or spread over several host devices with pmap."""

from __future__ import annotations

from protocol import Line

LINE = Line()

import os  # noqa: E402

import work as works  # noqa: E402

PARSER = works.arguments(__doc__)
PARSER.add_argument("--devices", type=int, default=1, help="host devices, one per core; more than one means pmap")
OPTIONS = PARSER.parse_args()
if OPTIONS.devices > 1:  # XLA reads this when it is loaded
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={OPTIONS.devices}"

import fedjax  # noqa: E402
import haiku as hk  # noqa: E402
import jax  # noqa: E402
import numpy as np  # noqa: E402
from fedjax.algorithms import fed_avg  # noqa: E402


def logits(batch: dict[str, jax.Array]) -> jax.Array:
    """The reference nets, in haiku."""
    images = batch["x"]
    if OPTIONS.work == "2nn":
        return hk.nets.MLP([200, 200, 10])(hk.Flatten()(images))
    halve = hk.MaxPool((2, 2, 1), (2, 2, 1), "VALID")
    layers = [hk.Conv2D(32, 5), jax.nn.relu, halve, hk.Conv2D(64, 5), jax.nn.relu, halve]
    layers += [hk.Flatten(), hk.Linear(512), jax.nn.relu, hk.Linear(10)]
    return hk.Sequential(layers)(images[..., None])


def main() -> None:
    """Load everything, say so, and run until the parent ends the run."""
    if OPTIONS.work == "lstm":
        raise SystemExit("the LSTM is not written for FedJAX")
    work = works.WORKS[OPTIONS.work]
    images = works.mnist(works.mnist_folder(OPTIONS.data))
    x, y = works.deal(*images, OPTIONS.partition, work.clients)
    clients = {f"{client:03d}".encode(): {"x": x[client], "y": y[client].astype(np.int32)} for client in range(len(y))}
    sampler = fedjax.client_samplers.UniformGetClientSampler(
        fedjax.InMemoryFederatedData(clients), num_clients=work.cohort, seed=OPTIONS.seed
    )
    model = fedjax.create_model_from_haiku(
        hk.transform(logits),
        {"x": x[0, :1], "y": y[0, :1].astype(np.int32)},
        lambda batch, output: fedjax.metrics.unreduced_cross_entropy_loss(batch["y"], output),
    )
    if OPTIONS.devices > 1:
        fedjax.set_for_each_client_backend("pmap")
    algorithm = fed_avg.federated_averaging(
        grad_fn=fedjax.model_grad(model),
        client_optimizer=fedjax.optimizers.sgd(OPTIONS.lr or work.lr),
        server_optimizer=fedjax.optimizers.sgd(1.0),
        client_batch_hparams=fedjax.ShuffleRepeatBatchHParams(batch_size=work.batch, num_epochs=work.epochs),
    )
    state = algorithm.init(model.init(jax.random.PRNGKey(OPTIONS.seed)))
    LINE.ready(parameters=sum(leaf.size for leaf in jax.tree_util.tree_leaves(state.params)), devices=OPTIONS.devices)
    while LINE.wait():
        state, _ = algorithm.apply(state, sampler.sample())
        jax.block_until_ready(state.params)
        LINE.done()


if __name__ == "__main__":
    main()
