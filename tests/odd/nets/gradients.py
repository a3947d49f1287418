"""Models that meddle with autograd: own functions, hooks, checkpoints, gradients inside forward."""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from tests.odd.table import CLASSES, FEATURES, Net, odd

FUNCTION = "own autograd function"


class Squared(torch.autograd.Function):
    """x², with half the true gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * x


@odd(FUNCTION, quick=True)
class UsesOwnFunction(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.out(Squared.apply(torch.tanh(self.first(x))))


class SquaredByNumpy(torch.autograd.Function):
    """x², computed outside torch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        values = x.detach().numpy()
        ctx.values = values.copy()
        return torch.from_numpy(np.square(values))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return torch.from_numpy(2 * ctx.values * gradient.numpy())


@odd(FUNCTION, quick=True)
class UsesNumpyFunction(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.out(SquaredByNumpy.apply(torch.tanh(self.first(x))))


class Reversed(torch.autograd.Function):
    """The gradient with the other sign."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -0.3 * gradient


@odd(FUNCTION)
class ReversesGradients(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.out(Reversed.apply(torch.tanh(self.first(x))))


STRAIGHT = "detached parts"


@odd(STRAIGHT)
class StraightThroughSign(Net):
    def forward(self, x: Tensor) -> Tensor:
        soft = torch.tanh(self.first(x))
        return self.out(soft + (soft.sign() - soft).detach())


@odd(STRAIGHT)
class StraightThroughRounding(Net):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        return self.out(hidden + (torch.round(hidden * 4) / 4 - hidden).detach())


@odd(STRAIGHT)
class DetachesAPart(Net):
    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        return self.out(hidden * hidden.detach().sigmoid())


@odd(STRAIGHT)
class HasANoGradPart(Net):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = self.first.weight.norm()
        return self.out(torch.tanh(self.first(x)) / scale)


@odd(STRAIGHT)
class ClampsItsWeights(Net):
    """Also in evaluation, which must not change the weights for it."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.first.weight.clamp_(-0.15, 0.15)
        return self.out(torch.tanh(self.first(x)))


@odd(STRAIGHT)
class ReplacesItsData(Net):
    """Gives a parameter other memory in every forward."""

    def forward(self, x: Tensor) -> Tensor:
        self.first.weight.data = F.normalize(self.first.weight.data)
        return self.out(torch.tanh(self.first(x)))


INSIDE = "gradients inside forward"


@odd(INSIDE)
class PenalisesItsGradient(Net):
    """The gradient of the output by the input is a feature: training needs second derivatives."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            at = x.detach().requires_grad_()
            energy = torch.tanh(self.first(at)).square().sum()
            (slope,) = torch.autograd.grad(energy, at, create_graph=True)
        return self.out(torch.tanh(self.first(x))) * (1 + slope.square().sum(1, keepdim=True))


@odd(INSIDE)
class UsesFuncGrad(Net):
    def forward(self, x: Tensor) -> Tensor:
        slope = torch.func.grad(lambda at: torch.tanh(self.first(at)).square().sum())(x)
        return self.out(torch.tanh(self.first(x))) * (1 + slope.square().sum(1, keepdim=True))


@odd(INSIDE)
class UsesVmap(Net):
    def forward(self, x: Tensor) -> Tensor:
        return torch.func.vmap(lambda row: self.out(torch.tanh(self.first(row))))(x)


@odd(INSIDE)
class CallsFunctionally(Net):
    """One step of gradient descent on its own features before it answers."""

    def forward(self, x: Tensor) -> Tensor:
        named = dict(self.first.named_parameters())

        def energy(at: dict[str, Tensor]) -> Tensor:
            return functional_call(self.first, at, (x,)).square().mean()

        slopes = torch.func.grad(energy)(named)
        adapted = {name: leaf - 0.1 * slopes[name] for name, leaf in named.items()}
        return self.out(torch.tanh(functional_call(self.first, adapted, (x,))))


CHECKPOINT = "checkpoints"


@odd(CHECKPOINT)
class ChecksPoint(Net):
    def __init__(self) -> None:
        super().__init__()
        self.middle = nn.Linear(6, 6)

    def inner(self, hidden: Tensor) -> Tensor:
        return torch.tanh(self.middle(torch.tanh(hidden)))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(checkpoint(self.inner, self.first(x), use_reentrant=False))


@odd(CHECKPOINT)
class ChecksPointReentrant(ChecksPoint):
    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return self.out(self.inner(self.first(x)))
        return self.out(checkpoint(self.inner, self.first(x), use_reentrant=True))


class Dropping(Net):
    """The same without a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.middle = nn.Linear(6, 6)

    def inner(self, hidden: Tensor) -> Tensor:
        return torch.tanh(self.middle(F.dropout(torch.tanh(hidden), 0.4, self.training)))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.dropout(self.inner(self.first(x)), 0.2, self.training))


@odd(CHECKPOINT)
class ChecksPointWithDropout(Dropping):
    """The mask of the second computation must be that of the first."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(self.inner, self.first(x), use_reentrant=False)
        return self.out(F.dropout(hidden, 0.2, self.training))


@odd(CHECKPOINT)
class KeepsSavedTensorsElsewhere(Net):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda kept: kept * 2, lambda kept: kept / 2):
            return self.out(torch.tanh(self.first(x)))


HOOKS = "hooks"


def _halve_output(module: nn.Module, given: Any, output: Tensor) -> Tensor:
    return output * 0.5


def _shift_input(module: nn.Module, given: tuple[Tensor]) -> tuple[Tensor]:
    return (given[0] + 0.1,)


def _double_gradient(module: nn.Module, inside: tuple[Tensor | None, ...], outside: Any) -> tuple[Tensor | None, ...]:
    return tuple(None if gradient is None else gradient * 2 for gradient in inside)


def _halve_gradient(gradient: Tensor) -> Tensor:
    return gradient * 0.5


def _clip_accumulated(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.clamp_(-0.01, 0.01)


@odd(HOOKS)
class HooksForward(Net):
    def __init__(self) -> None:
        super().__init__()
        self.first.register_forward_hook(_halve_output)
        self.out.register_forward_pre_hook(_shift_input)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.first(x)))


@odd(HOOKS)
class HooksBackward(Net):
    def __init__(self) -> None:
        super().__init__()
        self.out.register_full_backward_hook(_double_gradient)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.first(x)))


@odd(HOOKS)
class HooksATensor(Net):
    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        if hidden.requires_grad:
            hidden.register_hook(_halve_gradient)
        return self.out(hidden)


@odd(HOOKS)
class HooksAParameter(Net):
    def __init__(self) -> None:
        super().__init__()
        self.first.weight.register_hook(_halve_gradient)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.first(x)))


@odd(HOOKS)
class HooksAccumulation(Net):
    def __init__(self) -> None:
        super().__init__()
        self.first.weight.register_post_accumulate_grad_hook(_clip_accumulated)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.first(x)))


PARAMETERS = "parameters"
DECAYING = {"optimizer": "sgd", "lr": 0.05, "momentum": 0.9, "weight_decay": 0.1}
ADAM = {"optimizer": "adam", "lr": 0.02, "weight_decay": 0.1, "epsilon": 1e-4}


@odd(PARAMETERS, training=DECAYING, quick=True)
class HasAnUnusedLayer(Net):
    """Torch leaves parameters without a gradient alone: no decay, no momentum."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.first(x)))


@odd(PARAMETERS, training=ADAM)
class HasAnUnusedLayerUnderAdam(HasAnUnusedLayer):
    pass


@odd(PARAMETERS, training=DECAYING)
class UsesALayerSometimes(Net):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        return self.other(hidden) if x.mean() > 0.5 else self.out(hidden)


@odd(PARAMETERS, training=ADAM)
class UsesALayerSometimesUnderAdam(UsesALayerSometimes):
    pass


@odd(PARAMETERS, training=DECAYING, quick=True)
class HasFrozenParameters(Net):
    def __init__(self) -> None:
        super().__init__()
        self.first.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.first(x)))


@odd(PARAMETERS)
class HasAParameterList(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ParameterList([torch.randn(FEATURES, 6) * 0.2, torch.randn(6, CLASSES) * 0.2])

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.layers:
            x = torch.tanh(x @ weight)
        return x


@odd(PARAMETERS)
class HasAParameterDict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.by_name = nn.ParameterDict({"inside": torch.randn(FEATURES, 6) * 0.2, "outside": torch.randn(6, 3) * 0.2})

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.by_name["inside"]) @ self.by_name["outside"]


@odd(PARAMETERS)
class HasAScalarParameter(Net):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.first(x))) / self.temperature


TIED = "tied and shared"


@odd(TIED, quick=True)
class RegistersALayerTwice(Net):
    """The model of the issue: one layer with two names."""

    def __init__(self) -> None:
        super().__init__()
        self.again = self.first

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.first(x)) + torch.sigmoid(self.again(x)))


@odd(TIED, quick=True)
class TiesWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(FEATURES, 6)
        self.decode = nn.Linear(6, FEATURES)
        self.decode.weight = nn.Parameter(self.encode.weight.T.contiguous())
        self.back = nn.Linear(FEATURES, 6)
        self.back.weight = self.encode.weight
        self.out = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.back(torch.tanh(self.decode(torch.tanh(self.encode(x))))))


@odd(TIED)
class SharesAModule(Net):
    def __init__(self) -> None:
        super().__init__()
        shared = nn.Linear(6, 6)
        self.stack = nn.Sequential(shared, nn.Tanh(), shared, nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.stack(self.first(x)))


@odd(TIED)
class SharesAParameterBetweenModules(Net):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 6), nn.Linear(6, 6)
        self.right.bias = self.left.bias

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        return self.out(torch.tanh(self.left(hidden)) * torch.sigmoid(self.right(hidden)))


@odd(TIED)
def holds_its_part_in_a_list() -> nn.Module:
    """A layer that Python holds beside its registered name."""
    net = RegistersALayerTwice()
    net.__dict__["held"] = [net.first]
    return net
