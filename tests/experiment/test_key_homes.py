"""A key in the wrong table of an experiment file: the message says where it belongs."""

from pathlib import Path

import pytest

from fedloom.errors import InputError
from fedloom.experiment import experiment_file

TOP = "belongs at the top of the file, before the first [table]."
ALGORITHM = "is an algorithm: write `fedavg = {}` under [algorithm], with its own settings in the braces."


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("[train]\nlr = 0.1\nrounds = 3", f"`rounds` {TOP}"),
        ("[run]\nseeds = [1, 2]", f"`seeds` {TOP}"),
        ("[data]\nrounds = 3", f"`rounds` {TOP}"),
        ("[data]\nsplit = { rounds = 3 }", f"`rounds` {TOP}"),
        ("[algorithm]\nfedavg = { rounds = 3 }", f"`rounds` {TOP}"),
        ("[train]\nseed = 3", f"`seeds` {TOP} `seed` is a key of [data], [task], [system]."),
        ("[train]\nworkers = 2", "`workers` is a key of [run]."),
        ("[algorithm]\nfedavg = { workers = 2 }", "`workers` is a key of [run]."),
        ("[privacy]\nepsilon = 1.0", "Write dp = { epsilon = … } or example_dp = { epsilon = … }."),
        ("[privacy]\nmin_clients = 3", "Write secure_aggregation = { min_clients = … }."),
        (
            "[algorithm]\nfedavg = { delta = 1e-5 }",
            "`delta` is a key of dp in [privacy], example_dp in [privacy].",
        ),
        ("[train]\nlr = 0.1\nfedavg = {}", f"`fedavg` {ALGORITHM}"),  # [algorithm] was forgotten
        ("[data]\nsource = 'digits'\nscaffold = { lr = 0.1 }", f"`scaffold` {ALGORITHM.replace('fedavg', 'scaffold')}"),
        ("rounds = 3\nfedavg = {}", f"`fedavg` {ALGORITHM}"),
        ("[fedavg]\nlr = 0.1", f"`fedavg` {ALGORITHM}"),
        ("[data]\nlr = 0.1", "`lr` is a key of [train]."),
        ("[task]\nlearning_rate = 0.1", "`lr` is a key of [train]."),
        ("[train]\nlabel = 'dead'", "`label` is a key of [data] with source = csv."),
        ("[train]\npath = 'a.csv'", "`path` is a key of [data], for some sources."),
        ("[train]\nmu = 0.1", "`mu` is a key of the algorithms fedasync, fedprox, moon."),
        ("[algorithm]\nfedavg = { mu = 0.1 }", "`mu` is a key of the algorithms fedasync, fedprox, moon."),
        ("[train]\nalgorithms = ['fedavg']", "[algorithm] is a table of its own, with a key for each algorithm."),
        ("[train]\nrun = { workers = 2 }", "[run] is a table of its own."),
        ("[train]\nlearning_rate = 0.1", "Did you mean 'lr'?"),
        ("[train]\nquite_unknown = 1", "schedule, weight_decay."),
    ],
)
def test_a_key_in_the_wrong_table_is_sent_home(text: str, hint: str, tmp_path: Path) -> None:
    (tmp_path / "wrong.toml").write_text(text)
    with pytest.raises(InputError) as caught:
        experiment_file.load(tmp_path / "wrong.toml")
    assert str(caught.value).endswith(hint)
