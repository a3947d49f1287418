"""The ledger charges every release once, before it is made, and forgets nothing."""

import json
import stat
from pathlib import Path

import pytest

from fedloom.errors import StoreError
from fedloom.privacy.dp.accounting import Mechanism, epsilon
from fedloom.privacy.dp.ledger import KEY, LEDGER, Ledger, spent_in

Z = Mechanism(1.0, 0.1)


def opened(folder: Path | None) -> Ledger:
    return Ledger(folder, 1e-5, lambda: {"noise_multiplier": 1.0})


def test_the_secret_is_private_and_stays_the_same(tmp_path: Path) -> None:
    first = opened(tmp_path)
    assert len(first.secret) == 32
    assert stat.S_IMODE((tmp_path / KEY).stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / LEDGER).stat().st_mode) == 0o600
    assert opened(tmp_path).secret == first.secret
    assert opened(tmp_path / "other").secret != first.secret


def test_a_charge_is_on_disk_when_it_returns_and_counts_after_a_restart(tmp_path: Path) -> None:
    ledger = opened(tmp_path)
    assert ledger.charge("1/0/abc", Z)
    assert json.loads((tmp_path / LEDGER).read_text().splitlines()[-1])["release"] == "1/0/abc"
    again = opened(tmp_path)
    assert again.releases == 1
    assert again.epsilon().value == ledger.epsilon().value == epsilon({Z: 1}, 1e-5).value > 0


def test_the_same_release_is_charged_once_and_another_sum_again(tmp_path: Path) -> None:
    ledger = opened(tmp_path)
    assert [ledger.charge(release, Z) for release in ("1/0/abc", "1/0/abc", "1/0/def")] == [True, False, True]
    again = opened(tmp_path)
    assert not again.charge("1/0/def", Z)
    assert again.releases == 2
    assert again.epsilon().value == epsilon({Z: 2}, 1e-5).value


def test_the_cost_of_more_is_known_before_it_is_charged(tmp_path: Path) -> None:
    ledger = opened(tmp_path)
    assert ledger.epsilon({Z: 2}).value == epsilon({Z: 2}, 1e-5).value
    assert ledger.epsilon().value == 0.0


def test_the_settings_of_the_first_start_hold(tmp_path: Path) -> None:
    opened(tmp_path)
    assert Ledger(tmp_path, 1e-5, lambda: {"noise_multiplier": 9.0}).header == {"noise_multiplier": 1.0}


def test_what_was_spent_is_read_without_changing_the_file_that_another_process_writes(tmp_path: Path) -> None:
    opened(tmp_path).charge("1/0/abc", Z, 3)
    with (tmp_path / LEDGER).open("ab") as file:
        file.write(b'{"release": "1/1')
    before = (tmp_path / LEDGER).read_bytes()
    assert spent_in(tmp_path / LEDGER) == {Z: 3}
    assert (tmp_path / LEDGER).read_bytes() == before


def test_a_torn_last_line_was_never_released(tmp_path: Path) -> None:
    opened(tmp_path).charge("1/0/abc", Z)
    with (tmp_path / LEDGER).open("ab") as file:
        file.write(b'{"release": "2/0')
    ledger = opened(tmp_path)
    assert ledger.releases == 1
    assert ledger.charge("2/0/def", Z)
    assert opened(tmp_path).releases == 2


def test_a_damaged_ledger_ends_the_run(tmp_path: Path) -> None:
    opened(tmp_path).charge("1/0/abc", Z)
    content = (tmp_path / LEDGER).read_bytes()
    (tmp_path / LEDGER).write_bytes(content.replace(b'{"release"', b'{release"'))
    with pytest.raises(StoreError, match="nobody knows what was spent"):
        opened(tmp_path)


def test_a_ledger_without_its_secret_cannot_continue(tmp_path: Path) -> None:
    opened(tmp_path)
    (tmp_path / KEY).unlink()
    with pytest.raises(StoreError, match=r"privacy\.key, cannot be used"):
        opened(tmp_path)
    (tmp_path / KEY).write_bytes(b"short")
    with pytest.raises(StoreError, match="must have 32 bytes, and has 5"):
        opened(tmp_path)


def test_nothing_is_written_without_a_folder() -> None:
    ledger = opened(None)
    assert ledger.charge("1/0/abc", Z)
    assert not ledger.charge("1/0/abc", Z)
    assert ledger.secret != opened(None).secret
