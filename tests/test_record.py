"""Frozen, validated records and their messages."""

import importlib
import pickle
import pkgutil
from typing import Literal

import pytest
from pydantic import model_validator

import fedloom
from fedloom.algorithms import FedAvg, FedSGD
from fedloom.errors import FedloomError, InputError, ParameterError, nearest
from fedloom.federation.engine import Evaluation
from fedloom.federation.sampling import Sampling
from fedloom.record import Count, Decay, NonNegative, Positive, Record, Share, Whole, seconds
from fedloom.training.local import Training


class Recipe(Record):
    """One field of every kind."""

    count: Count = 1
    whole: Whole = 0
    positive: Positive = 1.0
    non_negative: NonNegative = 0.0
    share: Share = 0.5
    decay: Decay = 0.9
    name: Literal["boil", "bake"] = "boil"
    either: Count | Literal["all"] = "all"
    maybe: Positive | None = None
    flag: bool = False
    steps: tuple[str, ...] = ()


class Needy(Record):
    """A field without a default."""

    path: str


class Picky(Record):
    """A rule of its own."""

    low: Whole = 0
    high: Whole = 1

    @model_validator(mode="after")
    def _ordered(self) -> "Picky":
        if self.low > self.high:
            raise InputError(f"low = {self.low} is above high = {self.high}.")
        return self


def message(record: type[Record], **values: object) -> str:
    with pytest.raises(InputError) as caught:
        record(**values)
    return str(caught.value)


def test_an_unknown_parameter_is_named_with_the_nearest_known_one() -> None:
    assert message(Training, momentun=0.9) == (
        "Training has no parameter 'momentun'. Got 0.9 for it. "
        "Known: batch_size, beta1, beta2, centered, clients, clip, drop_last, epochs, epsilon, local_schedule, lr, "
        "momentum, optimizer, optimizer_state, patience, rho, schedule, weight_decay. Did you mean 'momentum'?"
    )
    assert message(Needy, path="x", zzz=1) == "Needy has no parameter 'zzz'. Got 1 for it. Known: path."


@pytest.mark.parametrize(
    ("values", "allowed"),
    [
        ({"count": 0}, "at least 1. Got 0 instead."),
        ({"positive": 0.0}, "more than 0.0. Got 0.0 instead."),
        ({"non_negative": -0.5}, "at least 0.0. Got -0.5 instead."),
        ({"share": 1.5}, "at most 1.0. Got 1.5 instead."),
        ({"decay": 1.0}, "less than 1.0. Got 1.0 instead."),
        ({"maybe": -1.0}, "more than 0.0. Got -1.0 instead."),
        ({"count": 1.5}, "a whole number. Got 1.5 instead."),
        ({"count": True}, "a whole number. Got True instead."),
        ({"whole": "3"}, "a whole number. Got '3' instead. Write 3 without quotes."),
        ({"whole": "3.5"}, "a whole number. Got '3.5' instead."),
        ({"positive": "0.1"}, "a number. Got '0.1' instead. Write 0.1 without quotes."),
        ({"positive": "1e-3"}, "a number. Got '1e-3' instead. Write 1e-3 without quotes."),
        ({"either": "16"}, "a whole number or 'all'. Got '16' instead. Write 16 without quotes."),
        ({"steps": "[1, 2]"}, "a list. Got '[1, 2]' instead. Write [1, 2] without quotes."),
        ({"positive": True}, "a number. Got True instead."),
        ({"flag": "perhaps"}, "true or false. Got 'perhaps' instead."),
        ({"steps": 3}, "a list. Got 3 instead."),
        ({"name": "bakee"}, "'boil' or 'bake'. Got 'bakee' instead. Did you mean 'bake'?"),
        ({"name": 7}, "'boil' or 'bake'. Got 7 instead."),
        ({"either": "al"}, "a whole number or 'all'. Got 'al' instead. Did you mean 'all'?"),
        ({"either": 0}, "at least 1 or 'all'. Got 0 instead."),
    ],
)
def test_a_wrong_value_is_named_with_what_is_allowed(values: dict[str, object], allowed: str) -> None:
    (name,) = values
    assert message(Recipe, **values) == f"The '{name}' parameter of Recipe must be {allowed}"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["positive", "non_negative"])
def test_numbers_must_be_finite(name: str, value: float) -> None:
    assert f"The '{name}' parameter of Recipe must be" in message(Recipe, **{name: value})


def test_a_missing_parameter_is_named() -> None:
    assert message(Needy) == "The 'path' parameter of Needy is needed."


def test_a_missing_field_is_named_with_its_meaning() -> None:
    class Described(Record):
        clients: int
        """The number of
        clients."""

    assert message(Described) == "The 'clients' parameter of Described is needed. The number of clients."
    assert message(Described, client=3).endswith("Known: clients. Did you mean 'clients'?")


def test_whole_numbers_are_numbers() -> None:
    assert Recipe(positive=2).positive == 2.0
    assert isinstance(Recipe(positive=2).positive, float)


def test_the_message_of_a_rule_of_its_own_stays_as_it_is() -> None:
    assert message(Picky, low=3) == "low = 3 is above high = 1."


def test_a_wrong_training_parameter_of_an_algorithm_is_named_as_such() -> None:
    assert message(FedAvg, lr=-1) == "The 'lr' parameter of Training must be more than 0.0. Got -1 instead."
    assert message(FedAvg, train={"lr": "x"}) == "The 'lr' parameter of Training must be a number. Got 'x' instead."
    assert message(FedAvg, batch_size="ful") == (
        "The 'batch_size' parameter of Training must be a whole number or 'full'. Got 'ful' instead. "
        "Did you mean 'full'?"
    )


def test_an_algorithm_knows_its_own_and_the_training_parameters() -> None:
    text = message(FedAvg, epoch=2)
    assert text.startswith("FedAvg has no parameter 'epoch'. Got 2 for it. Known: batch_size, ")
    assert "weights" in text
    assert text.endswith("Did you mean 'epochs'?")


def test_training_parameters_of_an_algorithm_may_be_given_flat_or_as_a_table_or_both() -> None:
    flat = FedAvg(lr=0.5, epochs=2)
    assert flat == FedAvg(train=Training(lr=0.5, epochs=2)) == FedAvg(train={"lr": 0.5}, epochs=2)
    assert FedAvg(train=Training(lr=0.5), epochs=2) == flat


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (
            {"optimizer": "adam", "momentum": 0.9},
            '\'momentum\' is for optimizer = "sgd" or "nesterov" or "rmsprop", not for "adam".',
        ),
        ({"beta1": 0.8}, '\'beta1\' is for optimizer = "adam" or "adamw", not for "sgd".'),
        (
            {"optimizer": "adagrad", "rho": 0.5},
            '\'rho\' is for optimizer = "adadelta" or "rmsprop", not for "adagrad".',
        ),
        (
            {"epsilon": 0.1},
            '\'epsilon\' is for optimizer = "adam" or "adamw" or "rmsprop" or "adagrad" or "adadelta", not for "sgd".',
        ),
    ],
)
def test_a_parameter_of_another_optimizer_is_refused(given: dict[str, object], meant: str) -> None:
    assert message(Training, **given) == meant


def test_fedsgd_refuses_what_has_no_meaning_for_it() -> None:
    assert message(FedSGD, momentum=0.9) == (
        "FedSGD takes one plain gradient step a round, so 'momentum' has no meaning. Leave it out, or use "
        'fedavg with batch_size = "full". Got momentum = 0.9.'
    )


def test_a_list_of_choices_names_the_wrong_one() -> None:
    text = message(Evaluation, splits=("tests",))
    assert text.startswith("The 'splits.0' parameter of Evaluation must be 'train', 'validation' or 'test'.")
    assert text.endswith("Got 'tests' instead. Did you mean 'test'?")


def test_a_cohort_takes_a_count_or_a_fraction() -> None:
    assert message(Sampling, count=3, fraction=0.5) == (
        "A cohort takes either a count or a fraction. Got count = 3 and fraction = 0.5."
    )
    assert "give cohort.fraction, not cohort.count" in message(Sampling, count=3, sampling="poisson")


def test_a_record_is_a_value() -> None:
    recipe = Recipe(count=2)
    assert recipe == Recipe(count=2) != Recipe(count=3)
    assert hash(recipe) == hash(Recipe(count=2))
    with pytest.raises(AttributeError, match=r"^Recipe\.count cannot be set: .* replace\(count=…\) makes another"):
        recipe.count = 3


def test_a_changed_copy_is_validated_and_the_original_stays() -> None:
    recipe = Recipe(count=2, share=0.1)
    assert recipe.replace(count=5) == Recipe(count=5, share=0.1)
    assert recipe.count == 2
    with pytest.raises(InputError, match="The 'count' parameter of Recipe must be at least 1"):
        recipe.replace(count=0)
    assert FedAvg(lr=0.5, epochs=3).replace(lr=0.1) == FedAvg(lr=0.1, epochs=3)


def test_an_error_survives_the_way_from_another_process() -> None:
    with pytest.raises(ParameterError) as caught:
        Recipe(count=0)
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value)
    assert (again.parameter, again.exit_code) == ("count", 2)
    assert isinstance(again, FedloomError)
    assert again.at("cook") == "[cook] count must be at least 1. Got 0 instead."


def test_a_hint_needs_a_name_that_is_close() -> None:
    assert nearest("epoch", ["epochs", "lr"]) == " Did you mean 'epochs'?"
    assert nearest("banana", ["epochs", "lr"]) == ""


def test_the_string_under_a_field_is_its_description_and_is_inherited() -> None:
    """A subclass that only changes a default keeps the meaning."""

    class Cake(Record):
        eggs: Count = 2
        """How many eggs."""

    class Pancake(Cake):
        eggs: Count = 3

    assert Cake.model_fields["eggs"].description == "How many eggs."
    assert Pancake.model_fields["eggs"].description == "How many eggs."
    assert Pancake().eggs == 3


def test_a_constant_may_replace_a_property_and_a_field_may_not() -> None:
    """Python would ask the property, whatever the field says."""

    class Sum(FedAvg):
        linear = False
        needs_all_from_start = "c is a mean over all clients"

    assert (Sum().linear, Sum.model_fields.keys()) == (False, FedAvg.model_fields.keys())
    assert Sum().needs_all_from_start == "c is a mean over all clients"
    with (
        pytest.warns(UserWarning, match="shadows"),
        pytest.raises(InputError, match="'linear' of Set is no setting"),
    ):
        type("Set", (FedAvg,), {"__annotations__": {"linear": bool}, "linear": False, "__module__": __name__})


def test_every_key_that_a_user_can_write_says_what_it_means() -> None:
    """The reference of the documentation is made from the descriptions."""
    for module in pkgutil.walk_packages(fedloom.__path__, "fedloom."):
        if not module.name.startswith("fedloom.flower") and not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    known, found = [Record], []
    while known:
        kinds = [kind for kind in known.pop().__subclasses__() if kind.__module__.startswith("fedloom.")]
        known += kinds
        found += [
            (kind.__name__, name)
            for kind in kinds
            for name, field in kind.model_fields.items()
            if not field.description
        ]
    assert found == []


def test_durations_are_numbers_with_a_unit() -> None:
    assert [seconds(text) for text in ("500ms", "60s", "1.5m", "2h", "7d")] == [0.5, 60.0, 90.0, 7200.0, 604800.0]
    for wrong in ("60", "s", "-1s", "0s", "1 s", "1w"):
        with pytest.raises(InputError, match="number with a unit"):
            seconds(wrong)
