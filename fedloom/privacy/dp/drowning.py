"""Says before a run whether its noise will drown what clients learn.

Noise on d numbers with deviation σ is σ √d long. Over T rounds it grows with √T, and what clients learn at most with T.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import log2, sqrt
from typing import TYPE_CHECKING

from fedloom.privacy.dp.at_client import LocalNoise
from fedloom.privacy.dp.example_level import ExamplePrivacy
from fedloom.privacy.protection import Protection
from fedloom.privacy.table import ExampleTable, PrivacyTable
from fedloom.training.settings import Training

if TYPE_CHECKING:
    from fedloom.federation.sampling import Sampling

# noise that is this many times as long as all that clients can learn: digits (10 classes, 2,410 parameters, 20 clients)
# had 76 % accuracy at 1.6 times, 42 % at 3.2 times and 25 % at 6.4 times, and 95 % without noise
DROWNS = 3.0
# noise on gradients drowns earlier, because those of single examples partly cancel and get shorter: digits (2,410
# parameters, 10 clients, 20 rounds, batches of 16, lr 0.1 and 0.5, one seed each) had 59 and 93 % at 0.1 times, 60 and
# 69 % at 0.3 times, 43 and 31 % at 0.55 times, 21 and 15 % at 1 times; with 2 epochs of batches of 8 (lr 0.1), 78 % at
# 0.3 times and 38 % at 0.54 times; with 19,210 parameters (lr 0.1), 75 % at 0.5 times and 49 % at 1.6 times
# it misses runs that learn slowly: 13 % at 0.32 times with 40 clients and two steps a round (44 % without noise and
# clipping), and 18 % at 0.17 times with lr 0.02 (42 %)
DROWNS_EXAMPLES = 0.5
FAINT = 20.0  # with an ε above this, no noise drowns anything


def cautions(
    table: PrivacyTable,
    sampling: Sampling,
    rounds: int,
    parameters: int,
    examples: Sequence[int],
    training: Training,
    by_examples: bool = False,
) -> Iterator[str]:
    """Yield a sentence for each noise that drowns learning; `examples` is how many each client trains on.

    `by_examples`, a mean weighs clients by them, and otherwise all alike.
    """
    clients = sampling.size(len(examples))
    over, on = f"Over {rounds} rounds with {clients} clients it is about", f"on {parameters:,} parameters"
    if table.dp is not None and rounds and (table.dp.epsilon or 0) <= FAINT:
        deviation = _of_clients(table, sampling, len(examples), rounds)
        ratio, in_a_round = deviation * sqrt(parameters), deviation * sqrt(rounds)
        if ratio > DROWNS:
            yield (
                f"[privacy] dp: noise will drown what is learnt. {over} {ratio:.2g} times as long as all clients' "
                f"changes together can be, {on}. More clients in a round, a smaller model or a larger ε help."
            )
        elif in_a_round > 1 and not table.dp.correlated:  # correlated noise cancels over rounds
            yield (
                f"[privacy] dp: with {clients} clients in a round, the noise on every single number of the model is "
                f"{in_a_round:.2g} times as large as the longest change of the whole model. Differential privacy of "
                "clients is for hundreds of them: more clients in a round or a larger ε help, or example_dp, which "
                "protects single examples."
            )
    if table.example_dp is not None and any(examples) and rounds and table.example_dp.epsilon <= FAINT:
        sizes = [size for size in examples if size]  # 0 where sites do not say it
        noise = {size: _of_examples(table.example_dp, training, size, rounds) for size in {*sizes}}  # small: much
        weights = [size if by_examples else 1 for size in sizes]
        squares = sum((weight * noise[size]) ** 2 for size, weight in zip(sizes, weights, strict=True))
        ratio = sqrt(squares * len(sizes) / sum(weights) ** 2 * parameters / clients)
        if ratio > DROWNS_EXAMPLES:
            yield (
                f"[privacy] example_dp: noise will drown much of what is learnt. {over} {ratio:.2g} times as long as "
                f"all gradients together can be, {on}, and most are shorter. More examples, more clients or a larger "
                "ε help."
            )


def _of_clients(table: PrivacyTable, sampling: Sampling, population: int, rounds: int) -> float:
    """Return the deviation of all rounds' noise on one number of the mean, where all clips add up to 1."""
    assert table.dp is not None
    if table.has_local_noise:
        multiplier = 2 * LocalNoise(table.dp, rounds, b"").mechanism.noise_multiplier
        return multiplier / sqrt(sampling.size(population) * rounds)
    dp = Protection(table, sampling, population, rounds).dp
    assert dp is not None
    added_up = sqrt(log2(rounds) + 1) / rounds if table.dp.correlated else 1 / sqrt(rounds)
    return dp.change_multiplier / dp.expected * added_up


def _of_examples(table: ExampleTable, training: Training, examples: int, rounds: int) -> float:
    """Return the deviation of the noise of all of a client's steps on one number, where all clips add up to 1."""
    steps = ExamplePrivacy(table, rounds, b"").steps(examples, training)
    return steps.mechanism.noise_multiplier / steps.expected_batch / sqrt(steps.count * rounds)
