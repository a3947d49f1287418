"""The clients of one call: what an algorithm's client half gets, on the machine that holds their data."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedloom import keys, user_code
from fedloom.data.federation import Federation
from fedloom.data.split import SplitName
from fedloom.errors import InputError, TrainingError, Unwanted
from fedloom.tree import Tree

if TYPE_CHECKING:
    from fedloom.privacy.dp.example_level import ExamplePrivacy


@dataclass(frozen=True)
class Setup:
    """How clients are computed. Fixed before the first round, recorded with the run, never based on timings."""

    group: int = 1  # clients trained side by side; 1 means one after another
    replay: bool = False  # record training steps and replay them, where that gives the same results
    micro_batch: int = 256  # the most rows in one pass of a full batch, where batches may be cut
    evaluation_batch: int = 1000  # the most rows in one pass of an evaluation
    device: str = "cpu"
    masked: bool = False  # the model has dropout or batch normalisation, which need keys and masks
    drops_evaluating: bool = False  # its dropout is also active in evaluation, and needs a key there
    normalises_features: bool = False  # it has batch normalisation that cannot use a batch of one example
    loss_is_mean: bool = False  # the loss of a batch is the mean of its examples' losses
    cuts_batches: bool = False  # computing a training batch in parts gives the same results
    rows_apart: bool = False  # in evaluation, the output for an example does not depend on the others
    target: tuple[float, float] | None = None  # mean and standard deviation by which labels are scaled


def always() -> None:
    """Go on."""


@dataclass(frozen=True)
class Clients:
    """Clients that are computed together. The first dimension of tensors that belong to them is the client."""

    federation: Federation
    ids: tuple[int, ...]
    seed: int = 0
    round: int = 0
    call: int = 0
    setup: Setup = Setup()
    watch_epochs: bool = False  # evaluate the validation split after every local epoch
    example_privacy: ExamplePrivacy | None = None  # with differential privacy of examples, how clients train
    go_on: Callable[[], None] = always  # called in every step: raises Unwanted once nobody waits for the result

    def __len__(self) -> int:
        return len(self.ids)

    def check_stacked(self, model: Tree, form: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> None:
        """Raise an error unless a model has a row for each of these clients."""
        if any(
            leaf.shape[:1] != (len(self),) or (name in form and leaf.dim() == len(form[name][0]))
            for name, leaf in model.items()
        ):
            raise ValueError(
                f"Clients train from a stacked model, with a row for each of these {len(self)} clients, and got one "
                'without: give them expand(shared["model"], len(data)).'
            )

    def __iter__(self) -> Iterator[Clients]:
        """Iterate over the clients one by one."""
        return (replace(self, ids=(client,)) for client in self.ids)

    @property
    def examples(self) -> Tensor:
        """The number of training examples of each client."""
        return torch.from_numpy(self.federation.counts(self.ids, "train"))

    def rows(self, position: int, split: SplitName) -> Tensor:
        """Return the rows of one client's split in the federation's tensors."""
        return self.federation.indices(self.ids[position], split)

    def name(self, position: int) -> str:
        return self.federation.name(self.ids[position])

    def key(self, position: int, purpose: str, *parts: int) -> int:
        """Return a key for this client in this call of this round."""
        return keys.key(self.seed, purpose, self.round, self.call, self.ids[position], *parts)

    def dropout_key(self, position: int, step: int) -> Tensor:
        """Return the two words of this client's dropout key in a step as a tensor."""
        return torch.tensor(keys.words(self.key(position, "dropout", step)), device=self.setup.device)

    def blame(self, error: Exception, phase: str, position: int) -> Exception:
        """Return the error as a TrainingError that names the round, the client, the phase and the line of your code."""
        if isinstance(error, (InputError, Unwanted)):
            return error
        what = str(error) if isinstance(error, TrainingError) else user_code.said(error) + self._hint(error)
        return TrainingError(f"Round {self.round}, client '{self.name(position)}', {phase}: {what}")

    def _hint(self, error: Exception) -> str:
        """Return what probably causes an error that torch words in its own way."""
        if "does not require grad" in str(error):
            return (
                "\nThe loss does not depend on the parameters. Is there a .detach() or no_grad in forward, or are all "
                "parameters frozen?"
            )
        if isinstance(error, IndexError) and "out of bounds" in str(error) and (count := len(self.federation.classes)):
            return f"\nThe labels have {count} classes, from 0: does the model give {count} outputs per example?"
        return _about_own(error)


def _about_own(error: Exception) -> str:
    """Return a hint for a line of your own code that reads a group that clients do not keep."""
    if not isinstance(error, KeyError) or not isinstance(group := error.args[0], str):
        return ""
    if not re.search(rf"""\n  > .*\bown\[['"]{re.escape(group)}['"]\]""", user_code.place_of(error)):
        return ""
    kept = f"{{**super().init_own(task, model), '{group}': …}}"
    return f"\nWhat a client keeps begins with init_own: write one that returns {kept}."
