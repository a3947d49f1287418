"""What a run refuses before its first round: settings that do not fit the algorithm, the clients or the model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedloom import keys
from fedloom.clock.choice import check_privacy
from fedloom.compression.method import form_of
from fedloom.compression.table import CompressTable
from fedloom.data.federation import Federation
from fedloom.errors import InputError
from fedloom.federation.sampling import Sampling
from fedloom.privacy.dp.at_client import AtClients
from fedloom.privacy.protection import Protection
from fedloom.record import Record
from fedloom.task import Task
from fedloom.tree import Tree
from fedloom.user_code import kind_of

if TYPE_CHECKING:
    from fedloom.algorithm import Algorithm
    from fedloom.clock.fleet import Fleet


def introduce(federation: object, task: object, seed: object = 0) -> Task:
    """Let a task see the data, and return it. Raise if they are something else than a federation and a task."""
    keys.check_seed(seed)
    swapped = isinstance(federation, Task) and isinstance(task, Federation)
    advice = " They are swapped: the federation is first." if swapped else ""
    if not isinstance(federation, Federation):
        made = "such as fedloom.Federation.from_arrays(x, y, clients=10)"
        raise InputError(f"The data must be a Federation, {made}. Got {kind_of(federation)} instead.{advice}")
    if not isinstance(task, Task):
        made = 'such as fedloom.Task(model, loss="cross_entropy")'
        raise InputError(f"What is learnt must be a Task, {made}. Got {kind_of(task)} instead.")
    task.see(federation)
    return task


def check_algorithm(given: object, what: str) -> None:
    """Raise if what should be an algorithm is something else."""
    # known by its methods: the class itself is defined above this folder
    if isinstance(given, Record) and hasattr(given, "init_own"):
        return
    shown, advice = repr(given), ""
    if isinstance(given, type) and hasattr(given, "init_own"):
        advice = f" Write {given.__name__}(), with brackets."
    elif isinstance(given, (Task, Federation)):
        shown, advice = kind_of(given), " The order is federation, task, algorithm."
    raise InputError(f"{what} must be an algorithm, such as fedloom.FedAvg(). Got {shown} instead.{advice}")


def check_rounds(rounds: object) -> None:
    """Raise if a number of rounds is not one."""
    if type(rounds) is not int or rounds < 0:
        raise InputError(f"rounds must be a whole number, at least 0. Got {rounds!r} instead.")


def check_settings(
    federation: Federation,
    algorithm: Algorithm,
    task: Task,
    initial: Tree,
    rounds: int,
    sampling: Sampling,
    protection: Protection | None,
    at_clients: AtClients | None,
    fleet: Fleet | None,
    compress: CompressTable,
) -> None:
    """Raise an error that names what does not fit."""
    check_algorithm(algorithm, "What you train")
    check_rounds(rounds)
    if rounds and not task.trainable:
        raise InputError(
            "All parameters of the model are frozen (requires_grad = False), so there is nothing to learn. Unfreeze "
            "some of them, or set rounds = 0 to evaluate the model as it is."
        )
    sampling.check(federation.clients)
    algorithm.train.check_clients(lambda: [federation.name(client) for client in range(federation.clients)])
    if algorithm.divides_by_lr:
        algorithm.train.refuse_zero_rates(type(algorithm).__name__, rounds)
    if protection is not None:
        protection.check(algorithm, initial if protection.table.has_distributed_noise else None)
    if at_clients is not None:
        at_clients.check(algorithm, task)
    if fleet is not None and protection is not None:
        check_privacy(fleet.system, sampling, protection.table, compress)
    compress.check(algorithm, protection.table if protection is not None else None)
    if compress.up is not None:
        compress.up.check(form_of(initial))
    if not algorithm.takes_complex and any(leaf.is_complex() for leaf in initial.values()):
        raise InputError(f"The model has complex parameters, and {type(algorithm).__name__} computes with real ones.")
