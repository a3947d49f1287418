"""Federated dropout."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, ClassVar, Literal

import torch
from annotated_types import Ge, Lt
from pydantic import Strict
from torch import Tensor, nn

from fedloom import keys
from fedloom.algorithm import Algorithm, Clients, Cohort, Groups, Step, Task, Tree, Update, by_size, without
from fedloom.tree import expand, map_leaves, stack


class FederatedDropout(Algorithm):
    """Each client trains a random part of the hidden units.

    w_j ← Σ p_k m_kj w_kj / Σ p_k m_kj, with m_kj = 1 if client k trained w_j; w_j stays if no client did. Use it for
    weak devices. A unit of a linear or convolutional layer is dropped by dropping the weights that lead into it, so
    activations must map zero to zero, as ReLU does. fedloom computes and sends dropped weights as zeros with a mask, so
    the times and bytes it reports do not show what a device saves. If clients keep their optimiser, its state for
    dropped weights does not change.
    """

    name: ClassVar[str] = "fed_dropout"
    takes_complex: ClassVar[bool] = False
    takes_noise: ClassVar[bool] = False
    reference: ClassVar[str] = (
        "Caldas et al., Expanding the Reach of Federated Learning by Reducing Client Resources, 2018"
    )

    weights: Literal["examples", "uniform"] = "examples"
    """How much each client counts in the mean."""
    rate: Annotated[float, Strict(), Ge(0), Lt(1)] = 0.25
    """The share of hidden units that each client drops."""

    @property
    def sums_cover_all(self) -> bool:
        return self.rate == 0

    def round(self, state: Groups, cohort: Cohort) -> Groups:
        found = cohort.reduce(self.client, state)
        had = found["had"]

        def leaf(share: Tensor, old: Tensor, mean: Tensor) -> Tensor:
            return torch.where(share > 0, mean / share.clamp(min=1e-12), old).to(old.dtype)

        return {"model": {**found["buffers"], **map_leaves(leaf, had, state["model"], found["model"])}}

    def client(self, task: Task, shared: Groups, own: Groups, data: Clients) -> tuple[Update, Groups]:
        masks = stack([self.masks(task, shared["model"], data.key(p, "sub-model")) for p in range(len(data))])
        start = expand(shared["model"], len(data))
        start = {**start, **map_leaves(torch.mul, masks, start)}
        # an optimiser that is kept would move dropped weights too: its state for them is zero, and is restored later
        before = own.get("optimizer", {})
        present = {
            n: torch.ones_like(x) if n.startswith("steps:") else masks[n.partition(":")[2]] for n, x in before.items()
        }
        own = {**own, "optimizer": map_leaves(torch.mul, before, present)} if before else own
        trained = self.fit(task, start, shared, {**own, "mask": masks}, data)
        sent = {name: trained.model[name] for name in masks}
        groups = {"model": sent, "had": masks, "buffers": without(trained.model, masks)}
        kept = {group: tree for group, tree in trained.own.items() if group != "mask"}
        if before:
            kept["optimizer"] = {n: torch.where(present[n] > 0, x, before[n]) for n, x in kept["optimizer"].items()}
        positions = {"model": "model", "buffers": "model"}  # dropped weights of "model" are zero
        return Update(groups, by_size(self.weights, data.examples), trained=trained, positions=positions), kept

    def correct(self, step: Step, shared: Groups, own: Groups) -> Tree:
        return map_leaves(torch.mul, step.grad, own["mask"])

    def masks(self, task: Task, model: Tree, key: int) -> Tree:
        """Return ones for the weights of one client's sub-model and zeros for the others."""
        masks = {name: torch.ones_like(model[name]) for name in task.trainable}
        kinds = (nn.Linear, nn.modules.conv._ConvNd)
        layers = [(path, layer.weight.shape) for path, layer in task.module.named_modules() if isinstance(layer, kinds)]
        for (path, (units, *_)), (following, (_, inputs, *_)) in pairwise(layers):
            left_out = torch.zeros(units, dtype=torch.bool)
            order = torch.from_numpy(keys.permutation(keys.key(key, path), units))
            left_out[order[: int(self.rate * units + 0.5)]] = True
            for name in (f"{path}.weight", f"{path}.bias"):
                if name in masks:
                    masks[name][left_out] = 0
            # weights that lead out of a dropped unit are dropped too; a flattened channel has several inputs there
            if inputs % units == 0 and f"{following}.weight" in masks:
                masks[f"{following}.weight"][:, left_out.repeat_interleave(inputs // units)] = 0
        return masks
