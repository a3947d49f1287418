"""Keyed dropout and row-masked batch normalisation."""

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedloom import keys
from fedloom.training.masking import Masked
from tests.test_keys import hash_by_hand

KEY = torch.tensor(keys.words(keys.key(1, "dropout")))
OTHER_KEY = torch.tensor(keys.words(keys.key(2, "dropout")))


def dropped(input: Tensor, p: float = 0.5, key: Tensor = KEY, fn: Callable[..., Tensor] = F.dropout) -> Tensor:
    with Masked(key):
        return fn(input, p, True)


def padded(input: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """The same examples with rubbish below them, and the mask that says so."""
    rubbish = 1000.0 + torch.arange(rows - len(input)).reshape(-1, *(1,) * (input.dim() - 1)).expand(
        -1, *input.shape[1:]
    )
    return torch.cat([input.detach(), rubbish.to(input.dtype)]), torch.arange(rows) < len(input)


def draw(*shape: int) -> Tensor:
    return torch.from_numpy(keys.generator(5).normal(2.0, 3.0, size=shape))


LAYERS = {
    "1d": (nn.BatchNorm1d, (5, 3)),
    "1d over time": (nn.BatchNorm1d, (5, 3, 4)),
    "2d": (nn.BatchNorm2d, (5, 3, 2, 4)),
    "3d": (nn.BatchNorm3d, (5, 3, 2, 2, 2)),
}


@pytest.mark.parametrize(
    "settings", [{}, {"momentum": 0.3}, {"affine": False}, {"track_running_stats": False}, {"eps": 0.1}]
)
@pytest.mark.parametrize("kind", LAYERS)
def test_batch_norm_of_masked_rows_is_torchs_on_the_rows_that_exist(kind: str, settings: dict[str, object]) -> None:
    layer, shape = LAYERS[kind]
    theirs, ours = layer(3, **settings).double().train(), layer(3, **settings).double().train()
    if theirs.affine:
        for norm in (theirs, ours):
            nn.init.constant_(norm.weight, 1.7)
            nn.init.constant_(norm.bias, -0.2)
    x = draw(*shape).requires_grad_()
    longer, mask = padded(x, 8)
    longer.requires_grad_()
    with Masked(None, mask):
        found = ours(longer)
    expected = theirs(x)
    torch.testing.assert_close(found[:5], expected, rtol=1e-9, atol=1e-9)
    for name, buffer in theirs.named_buffers():
        torch.testing.assert_close(dict(ours.named_buffers())[name], buffer, rtol=1e-12, atol=1e-12)
    # the gradients agree too, and what is only padding gets none
    expected.square().sum().mul(0.5).add(expected.pow(3).sum()).backward()
    real = found[:5]
    real.square().sum().mul(0.5).add(real.pow(3).sum()).backward()
    torch.testing.assert_close(longer.grad[:5], x.grad, rtol=1e-7, atol=1e-7)
    assert torch.count_nonzero(longer.grad[5:]) == 0
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(dict(ours.named_parameters())[name].grad, parameter.grad, rtol=1e-9, atol=1e-9)


def test_batch_norm_without_a_mask_is_torchs_own() -> None:
    theirs, ours = nn.BatchNorm1d(3).double(), nn.BatchNorm1d(3).double()
    with Masked(KEY):
        found = ours(draw(5, 3))
    assert torch.equal(found, theirs(draw(5, 3)))
    assert torch.equal(ours.running_var, theirs.running_var)


def test_batch_norm_in_evaluation_ignores_the_mask() -> None:
    norm = nn.BatchNorm1d(3).double()
    norm.running_mean.fill_(1.5)
    norm.eval()
    before = norm.running_var.clone()
    with Masked(KEY, torch.tensor([True, False, False, False, False])):
        found = norm(draw(5, 3))
    assert torch.equal(found, norm(draw(5, 3)))
    assert torch.equal(norm.running_var, before)


def test_a_lone_example_is_refused_by_torch_itself() -> None:
    with Masked(KEY), pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        nn.BatchNorm1d(3).double()(draw(1, 3))


def test_dropout_in_place_changes_what_it_is_given() -> None:
    x = torch.ones(40)
    with Masked(KEY):
        output = F.dropout(x, 0.5, inplace=True)
    assert output is x
    assert sorted(set(x.tolist())) == [0.0, 2.0]


def test_lanes_with_different_numbers_of_rows_are_normalised_each_by_itself() -> None:
    counts = torch.tensor([1, 3, 5, 0])
    x = draw(4, 5, 3)
    masks = torch.arange(5) < counts.unsqueeze(1)
    means = torch.zeros(4, 3, dtype=torch.float64)
    variances = torch.ones(4, 3, dtype=torch.float64)

    def one(x: Tensor, mask: Tensor, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, variance = mean.clone(), variance.clone()
        with Masked(None, mask):
            output = F.batch_norm(x, mean, variance, training=True)
        return output, mean, variance

    output, mean, variance = torch.func.vmap(one)(x, masks, means, variances)
    for lane in (1, 2):
        expected_mean, expected_variance = torch.zeros(3).double(), torch.ones(3).double()
        rows = x[lane, : counts[lane]]
        expected = F.batch_norm(rows, expected_mean, expected_variance, training=True)
        torch.testing.assert_close(output[lane, : counts[lane]], expected)
        torch.testing.assert_close(mean[lane], expected_mean)
        torch.testing.assert_close(variance[lane], expected_variance)
    assert torch.isfinite(output).all()  # also where there are no rows at all


def test_the_mode_counts_what_it_sees() -> None:
    with Masked(KEY) as mode:
        F.dropout(draw(2, 3), 0.5)
        F.batch_norm(draw(2, 3, 4, 5), None, None, training=True)
        F.batch_norm(draw(2, 3), None, None, training=True)
    assert mode.dropouts == 1
    assert mode.norms == [20, 1]


def test_dropout_drops_at_its_rate_and_scales_up_the_rest() -> None:
    output = dropped(torch.ones(400, 100), 0.3)
    kept = output != 0
    assert kept.float().mean().item() == pytest.approx(0.7, abs=0.01)
    assert torch.equal(output[kept], torch.full_like(output[kept], 1 / 0.7))


def test_the_dropout_mask_is_the_hash_of_key_position_and_call_in_any_process() -> None:
    key, call = keys.key(9, "dropout", 4), 1
    low, high = keys.words(key)
    bits = [hash_by_hand(hash_by_hand((n + low) % 2**32) ^ (high + call * 0x9E3779B1) % 2**32) for n in range(12)]
    with Masked(torch.tensor([low, high])):
        F.dropout(torch.ones(12), 0.4)
        second = F.dropout(torch.ones(12), 0.4)
    assert (second != 0).tolist() == [(number >> 8) / 2**24 >= 0.4 for number in bits]


@pytest.mark.parametrize("fn", [F.dropout, F.alpha_dropout, F.dropout1d, F.feature_alpha_dropout])
def test_dropout_of_an_example_does_not_depend_on_the_padding_below_it(fn: Callable[..., Tensor]) -> None:
    x = torch.ones(9, 4, 5)
    assert torch.equal(dropped(x, fn=fn)[:3], dropped(x[:3], fn=fn))


def test_dropout_in_a_lane_is_what_it_is_alone() -> None:
    lanes = torch.stack([OTHER_KEY, KEY])
    side_by_side = torch.func.vmap(lambda x, key: dropped(x, key=key))(torch.ones(2, 6, 5), lanes)
    assert torch.equal(side_by_side[1], dropped(torch.ones(6, 5)))
    assert torch.equal(side_by_side[0], dropped(torch.ones(6, 5), key=OTHER_KEY))


def test_dropout_of_two_steps_and_of_two_layers_is_unrelated() -> None:
    x = torch.ones(100, 100)
    with Masked(KEY):
        first, second = F.dropout(x, 0.5), F.dropout(x, 0.5)
    next_step = dropped(x, key=OTHER_KEY)
    next_pass = dropped(x, key=KEY + 1)  # how the passes of one large batch are told apart
    for other in (second, next_step, next_pass):
        assert ((first != 0) == (other != 0)).float().mean().item() == pytest.approx(0.5, abs=0.03)


def test_dropout_that_is_switched_off_changes_nothing() -> None:
    x = draw(4, 3)
    with Masked(KEY):
        assert torch.equal(F.dropout(x, 0.5, training=False), x)
        assert torch.equal(F.dropout(x, 0.0), x)
        assert torch.equal(nn.Dropout(0.5).eval()(x), x)


@pytest.mark.parametrize("fn", [F.dropout, F.dropout1d, F.alpha_dropout])
def test_dropping_everything_leaves_what_torch_leaves(fn: Callable[..., Tensor]) -> None:
    x = torch.ones(2, 3, 4)
    assert torch.equal(dropped(x, 1.0, fn=fn), fn(x, 1.0, True))


def test_dropout_keeps_the_type_and_leaves_its_input_alone() -> None:
    x = draw(10, 10)
    before = x.clone()
    assert dropped(x).dtype == torch.float64
    assert torch.equal(x, before)


def test_dropout_passes_gradients_only_through_what_was_kept() -> None:
    x = torch.ones(50, requires_grad=True)
    output = dropped(x)
    output.sum().backward()
    assert torch.equal(x.grad, output.detach())


@pytest.mark.parametrize(
    ("fn", "shape"),
    [
        (F.dropout1d, (20, 30, 4)),
        (F.dropout2d, (20, 30, 4, 4)),
        (F.dropout3d, (20, 30, 2, 2, 2)),
        (F.dropout2d, (20, 30, 4)),  # what torch takes for channels here are also the second dimension
        (F.dropout2d, (20, 30)),  # after flattening, as in many a tutorial
        (F.feature_alpha_dropout, (20, 30, 4)),
    ],
)
def test_channel_dropout_decides_once_per_example_and_channel_as_torch_does(
    fn: Callable[..., Tensor], shape: tuple[int, ...]
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says which dimension it takes for the channels
        decided = dropped(torch.ones(shape), 0.4, fn=fn).reshape(20, 30, -1)
        torch.manual_seed(0)
        theirs = fn(torch.ones(shape), 0.4, True).reshape(20, 30, -1)
    for output in (decided, theirs):
        assert torch.equal(output, output[:, :, :1].expand_as(output))
        kept = (output[:, :, 0] == output.max()).float()
        assert kept.mean().item() == pytest.approx(0.6, abs=0.08)
        assert ((kept.sum(1) > 0) & (kept.sum(1) < 30)).all()  # no example stands or falls as a whole


def test_alpha_dropout_keeps_mean_and_variance_and_uses_torchs_values() -> None:
    x = torch.from_numpy(keys.generator(3).normal(size=(400, 100))).float()
    output = dropped(x, 0.2, fn=F.alpha_dropout)
    assert output.mean().item() == pytest.approx(0.0, abs=0.03)
    assert output.std().item() == pytest.approx(1.0, abs=0.03)
    theirs = F.alpha_dropout(torch.zeros(1000), 0.2, True).unique()
    ours = dropped(torch.zeros(1000), 0.2, fn=F.alpha_dropout).unique()
    torch.testing.assert_close(ours, theirs)


def test_keyed_dropout_does_not_touch_the_global_generator() -> None:
    before = torch.random.get_rng_state()
    for fn in (F.dropout, F.alpha_dropout, F.dropout1d, F.feature_alpha_dropout):
        dropped(torch.ones(4, 5, 6), fn=fn)
    assert torch.equal(torch.random.get_rng_state(), before)
