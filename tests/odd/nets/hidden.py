"""State that is easily overlooked: a hostile reading found these."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from tests.odd.table import FEATURES, Net, odd

KIND = "hidden state"


class Plain(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.first(x)))


@odd(KIND, quick=True)
class HasAnInfiniteMask(Net):
    """Looks across rows, and has a buffer that is not finite: no reason to look away."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.full((3, 3), float("-inf")).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.first(x - x.mean(0))))


@odd(KIND, quick=True)
class FillsAnEmptyBuffer(Net):
    def __init__(self, persistent: bool = False) -> None:
        super().__init__()
        self.register_buffer("centre", None, persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        if self.centre is None:
            self.centre = x.detach().mean(0)
        return self.out(torch.tanh(self.first(x - self.centre)))


@odd(KIND, refused="saved buffers when it is first used")
def fills_an_empty_saved_buffer() -> nn.Module:
    return FillsAnEmptyBuffer(persistent=True)


@odd(KIND, quick=True)
class ChangesWhichPartIsActive(Net):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(FEATURES, 6)
        self.active = self.first

    def forward(self, x: Tensor) -> Tensor:
        self.active = self.other if self.active is self.first else self.first
        return self.out(torch.tanh(self.active(x)))


class Growing:
    """An object that counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, module: Any, given: Any, output: Tensor) -> Tensor:
        return self.grow(output)

    def grow(self, value: Tensor) -> Tensor:
        self.calls += 1
        return value * (1 + 0.1 * self.calls)


@odd(KIND, quick=True)
class HasAHookThatCounts(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.first.register_forward_hook(Growing())


@odd(KIND, quick=True)
class HasAMethodOfAHelper(Net):
    def __init__(self) -> None:
        super().__init__()
        self.grow = Growing().grow

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.grow(self.first(x))))


@odd(KIND)
class RegistersAHookLate(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 2:
            self.first.register_forward_hook(lambda module, given, output: output * 0.5)
        return super().forward(x)


@odd(KIND, quick=True)
class FreezesALayerLate(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 2:
            self.first.requires_grad_(False)
        return super().forward(x)


@odd(KIND, batch=5, quick=True)
class StopsNormalisingLate(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.calls = nn.BatchNorm1d(6), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 2:
            self.norm.eval()
        return self.out(torch.tanh(self.norm(self.first(x))))


@functools.lru_cache(None)
def weights_for(rows: int) -> Tensor:
    return torch.linspace(1, 2, rows).unsqueeze(1)


@odd(KIND, quick=True)
class CachesByBatchSize(Net):
    """What is made while a step is recorded is used later."""

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.first(x)) * weights_for(len(x)).to(x.dtype))
