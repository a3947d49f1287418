"""Models that remember: buffers of every kind, and what Python keeps between calls."""

import itertools
import random
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.ao.quantization import FakeQuantize, MinMaxObserver, MovingAverageMinMaxObserver

from tests.odd.table import CLASSES, FEATURES, Net, odd

BUFFERS = "buffers"


@odd(BUFFERS, quick=True)
class UpdatesABuffer(Net):
    """A running mean, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("middle", torch.zeros(FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.middle.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return self.out(torch.tanh(self.first(x - self.middle)))


@odd(BUFFERS, quick=True)
class AssignsABuffer(UpdatesABuffer):
    """A running mean that is another tensor after every step."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.middle = 0.9 * self.middle + 0.1 * x.mean(0)
        return self.out(torch.tanh(self.first(x - self.middle)))


@odd(BUFFERS, quick=True)
class CountsExamples(Net):
    """A whole number that decides something."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += x.shape[0]
        return self.out(torch.tanh(self.first(x))) / (1 + self.seen / 100)


@odd(BUFFERS, quick=True)
class AssignsACount(CountsExamples):
    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen = self.seen + len(x)
        return self.out(torch.tanh(self.first(x))) / (1 + self.seen / 100)


@odd(BUFFERS, quick=True)
class AssignsAScale(Net):
    """A buffer that is another tensor after every step, whatever the rows are."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.scale = 0.95 * self.scale + 0.01
        return self.out(torch.tanh(self.first(x)) * self.scale)


@odd(BUFFERS, quick=True)
class CountsOnly(CountsExamples):
    """A counter that nothing depends on."""

    def forward(self, x: Tensor) -> Tensor:
        self.seen += len(x) * self.training
        return self.out(torch.tanh(self.first(x)))


@odd(BUFFERS)
class HasABufferThatIsNotSaved(Net):
    """Every client begins with it as it was built."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("middle", torch.zeros(FEATURES), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.middle.lerp_(x.mean(0), 0.2)
        return self.out(torch.tanh(self.first(x - self.middle)))


@odd(BUFFERS)
class AssignsABufferThatIsNotSaved(HasABufferThatIsNotSaved):
    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.middle = torch.lerp(self.middle, x.mean(0), 0.2)
        return self.out(torch.tanh(self.first(x - self.middle)))


@odd(BUFFERS, quick=True)
class WritesInEvaluation(Net):
    """Measuring must not change what is learnt."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("middle", torch.zeros(FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        self.middle.lerp_(x.mean(0), 0.1)
        return self.out(torch.tanh(self.first(x - self.middle)))


@odd(BUFFERS)
class AssignsInEvaluation(WritesInEvaluation):
    def forward(self, x: Tensor) -> Tensor:
        self.middle = torch.lerp(self.middle, x.mean(0), 0.1)
        return self.out(torch.tanh(self.first(x - self.middle)))


@odd(BUFFERS)
class HasATruthBuffer(Net):
    """Which features were ever large."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("large", torch.zeros(FEATURES, dtype=torch.bool))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.large |= (x > 2).any(0)
        return self.out(torch.tanh(self.first(torch.where(self.large, x * 0.5, x))))


@odd(BUFFERS)
class AveragesItsWeights(Net):
    """An exponential moving average of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", self.first.weight.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.average.lerp_(self.first.weight.detach(), 0.3)
        return self.out(torch.tanh(self.first(x)) + torch.tanh(F.linear(x, self.average)))


@odd(BUFFERS)
class ComputesBatchNormItself(Net):
    """F.batch_norm with statistics of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("variance", torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if len(x) > 1:
            hidden = F.batch_norm(hidden, self.mean, self.variance, training=self.training)
        return self.out(torch.relu(hidden))


@odd(BUFFERS, refused="memory")
class GrowsABuffer(Net):
    """A saved buffer that is another shape at every client: there is no mean of such."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("memory", torch.zeros(1, 6))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        if self.training:
            self.memory = torch.cat([self.memory, hidden.detach().mean(0, keepdim=True)])
        return self.out(hidden + self.memory.mean(0))


@odd(BUFFERS)
class GrowsABufferThatIsNotSaved(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("memory", torch.zeros(1, 6), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        if self.training:
            self.memory = torch.cat([self.memory, hidden.detach().mean(0, keepdim=True)])
        return self.out(hidden + self.memory.mean(0))


@odd(BUFFERS)
class KeepsAQueue(Net):
    """A memory bank with a pointer, as contrastive methods have."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(10, 6))
        self.register_buffer("at", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        logits = self.out(hidden + (hidden @ self.queue.clone().T).softmax(1) @ self.queue.clone())
        if self.training:
            self.queue[int(self.at)] = hidden.detach().mean(0)
            self.at.copy_((self.at + 1) % 10)
        return logits


OBSERVERS = "observers"


@odd(OBSERVERS)
class Observed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.watch = MinMaxObserver()

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        self.watch(hidden.detach())
        return self.out(hidden * (self.watch.max_val - self.watch.min_val))


@odd(OBSERVERS)
class ObservedOnAverage(Net):
    def __init__(self) -> None:
        super().__init__()
        self.watch = MovingAverageMinMaxObserver(averaging_constant=0.1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        if self.training:
            self.watch(hidden.detach())
        return self.out(hidden)


@odd(OBSERVERS)
class FakelyQuantised(Net):
    """Quantisation-aware training."""

    def __init__(self) -> None:
        super().__init__()
        self.quantise = FakeQuantize(MovingAverageMinMaxObserver, quant_min=0, quant_max=255)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.quantise(torch.tanh(self.first(x)).float()).to(x.dtype)
        return self.out(hidden)


PYTHON = "state in Python"


@odd(PYTHON, quick=True)
class CountsItsCalls(Net):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.out(torch.tanh(self.first(x)) / self.calls)


@odd(PYTHON, quick=True)
class ChangesAfterSomeCalls(Net):
    """The counter shows only after a while."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        hidden = self.first(x)
        return self.out(torch.tanh(hidden) if self.calls < 4 else hidden.relu())


@odd(PYTHON)
class CoolsDown(Net):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = 2.0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.temperature *= 0.95
        return self.out(torch.tanh(self.first(x))) / self.temperature


@odd(PYTHON)
class CountsByIterator(Net):
    def __init__(self) -> None:
        super().__init__()
        self.ticks = itertools.count(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.first(x)) / next(self.ticks))


@odd(PYTHON, quick=True)
class DrawsFromPython(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.first(x)) * (0.5 + random.random()))


@odd(PYTHON, quick=True)
class SkipsLayersByPython(Net):
    """Stochastic depth, as most people write it."""

    def __init__(self) -> None:
        super().__init__()
        self.middle = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        if not self.training or random.random() < 0.6:
            hidden = hidden + torch.tanh(self.middle(hidden))
        return self.out(hidden)


@odd(PYTHON, quick=True)
class DrawsFromNumpy(Net):
    def forward(self, x: Tensor) -> Tensor:
        noise = torch.from_numpy(np.random.normal(size=x.shape)).to(x.dtype)
        return self.out(torch.tanh(self.first(x + 0.1 * noise)))


@odd(PYTHON)
class HasATorchGenerator(Net):
    def __init__(self) -> None:
        super().__init__()
        self.draws = torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.first(x + 0.1 * torch.randn(x.shape, generator=self.draws, dtype=x.dtype))))


@odd(PYTHON)
class HasANumpyGenerator(Net):
    def __init__(self) -> None:
        super().__init__()
        self.draws = np.random.default_rng(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.first(x)) * self.draws.uniform(0.5, 1.5))


@odd(PYTHON)
class HasAPythonGenerator(Net):
    def __init__(self) -> None:
        super().__init__()
        self.draws = random.Random(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.first(x)) * self.draws.uniform(0.5, 1.5))


@odd(PYTHON, quick=True)
class KeepsItsHiddenState(Net):
    """What the last batch left goes into the next."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        now = torch.tanh(self.first(x))
        if self.hidden is not None:
            now = now + 0.5 * self.hidden
        self.hidden = now.detach().mean(0)
        return self.out(now)


@odd(PYTHON)
class ChangesAPlainTensor(Net):
    """A tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.middle = torch.zeros(FEATURES, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        self.middle.lerp_(x.mean(0).double(), 0.2)
        return self.out(torch.tanh(self.first(x - self.middle.to(x.dtype))))


@odd(PYTHON)
class RemembersInAList(Net):
    def __init__(self) -> None:
        super().__init__()
        self.sizes: deque[float] = deque(maxlen=5)

    def forward(self, x: Tensor) -> Tensor:
        self.sizes.append(1.0 + len(x) / 4)
        return self.out(torch.tanh(self.first(x)) / (sum(self.sizes) / len(self.sizes)))


@odd(PYTHON)
class CachesTheFirstBatch(Net):
    def __init__(self) -> None:
        super().__init__()
        self.cache: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        if "middle" not in self.cache:
            self.cache["middle"] = x.mean(0)
        return self.out(torch.tanh(self.first(x - self.cache["middle"])))


@odd(PYTHON)
class TogglesItself(Net):
    """Every second call goes another way."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(6, CLASSES)
        self.turn = False

    def forward(self, x: Tensor) -> Tensor:
        self.turn = not self.turn
        hidden = torch.tanh(self.first(x))
        return self.out(hidden) if self.turn else self.other(hidden)


def _counter() -> Callable[[], int]:
    count = 0

    def tick() -> int:
        nonlocal count
        count += 1
        return count

    return tick


@odd(PYTHON, limit=True)
class CountsInAClosure(Net):
    """A counter that no attribute shows."""

    def __init__(self) -> None:
        super().__init__()
        self.tick = _counter()

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.first(x)) / self.tick())


LAZY = "built late"


@odd(LAZY)
class LazyLayer(nn.Module):
    """The first examples give the layer its size, before anything is sent."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.LazyLinear(6)
        self.out = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.first(x)))


@odd(LAZY)
def lazy_layer_after_a_dry_run() -> nn.Module:
    net = LazyLayer()
    net(torch.zeros(2, FEATURES))
    return net


@odd(LAZY, refused="[Ll]azy|built|parameters")
class BuildsInForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first: Any = None
        self.out = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        if self.first is None:
            self.first = nn.Linear(x.shape[1], 6).to(x.dtype)
        return self.out(torch.tanh(self.first(x)))


@odd(LAZY, training={"optimizer": "sgd", "lr": 0.1})
class BuildsATableInForward(Net):
    """A constant that is made when it is first needed."""

    def __init__(self) -> None:
        super().__init__()
        self.waves: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.waves is None:
            self.waves = torch.sin(torch.arange(x.shape[1], dtype=x.dtype))
        return self.out(torch.tanh(self.first(x + self.waves)))
