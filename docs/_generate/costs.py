"""How long a row that was not run would take on one free core, at speeds that were measured."""

from __future__ import annotations

from fedloom.experiment.experiment_file import Experiment

# seconds of processor time: docs/reproductions/fedavg-mnist.md and seven-ways.md say how they were measured;
# the MNIST CNN in bfloat16, as its longer rows are run
MNIST_IMAGE: dict[object, float] = {10: 0.57e-3, 50: 0.29e-3, "full": 0.36e-3}  # an image and epoch, by batch size
MNIST_TEST = 0.93  # 10,000 images
STEP, FORWARD = 0.646, 0.254  # 32 natural images
STEPS, TESTED = 134, 1380  # of an epoch, at all users; images in all users' tests, and in all their validation splits


def hours(experiment: Experiment, label: str | None, rounds: float) -> float | None:
    """Return the hours of one algorithm and seed; None if the speed of the model was not measured."""
    if experiment.task.model == "mnist_cnn":
        return rounds * _mnist_round(experiment) / 3600
    return rounds * _images_round(experiment, label) / 3600 if experiment.task.model == "natural_images_cnn" else None


def _mnist_round(experiment: Experiment) -> float:
    clients = max(round(100 * experiment.cohort.fraction), 1)
    return clients * 600 * experiment.train.epochs * MNIST_IMAGE[experiment.train.batch_size] + MNIST_TEST


def _images_round(experiment: Experiment, label: str | None) -> float:
    scored = {"central-selective": 1, "central-weighted": 1, "peer-selective": 8, "peer-weighted": 8}.get(str(label), 0)
    passes = 2 + 8 + scored  # everyone's own tests before and after training, everybody's tests, and scores
    return experiment.train.epochs * STEPS * STEP + passes * TESTED / 32 * FORWARD
