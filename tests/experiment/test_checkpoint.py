from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedloom.errors import InputError, StoreError
from fedloom.experiment import checkpoint
from fedloom.experiment.checkpoint import Checkpoint, load, save
from fedloom.federation.engine import Snapshot
from fedloom.tree import Groups


def state(value: float) -> Groups:
    return {"model": {"w": torch.full((3,), value)}}


def own(value: float) -> Groups:
    return {"personal": {"b": torch.full((2,), value)}}


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def found(folder: Path) -> Checkpoint:
    loaded = load(folder)
    assert loaded is not None
    return loaded


def same(a: dict[Any, Any], b: dict[Any, Any]) -> bool:
    """Equal to the bit: keys and their order, types, shapes, values."""
    if list(a) != list(b):
        return False
    for name, value in a.items():
        if isinstance(value, Tensor):
            bits = [leaf.contiguous().reshape(-1).view(torch.uint8) for leaf in (value, b[name])]
            if value.dtype != b[name].dtype or value.shape != b[name].shape or not torch.equal(*bits):
                return False
        elif not same(value, b[name]):
            return False
    return True


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def delete(path: Path) -> None:
    path.unlink()


def test_there_is_nothing_to_load_from_a_new_folder(tmp_path: Path) -> None:
    assert load(tmp_path / "none") is None
    assert load(tmp_path) is None


def test_every_kind_of_leaf_comes_back_bit_for_bit_and_in_order(tmp_path: Path) -> None:
    stack = torch.arange(12, dtype=torch.float64).reshape(3, 4)
    kinds: Groups = {
        "zeta": {"z": torch.tensor(3.5), "a": torch.tensor([-0.0, float("nan"), float("inf"), 1e-42])},
        "empty": {},
        "counts": {"n": torch.tensor(7), "mask": torch.tensor([True, False]), "bytes": torch.tensor([255, 0]).byte()},
        "views": {
            "row": stack[1],
            "other": stack[2],
            "column": stack[:, 1],
            "again": stack[1],
            "wide": torch.tensor([1.0]).expand(4),
            "part": stack[0, 1:3],
        },
        "half": {"h": torch.ones(2, dtype=torch.float16), "b": torch.ones(3, dtype=torch.bfloat16)},
        "nothing": {"x": torch.empty(0, 3), "y": torch.empty(0, dtype=torch.int64)},
        "names": {"layers/0.weight": torch.ones(1), "ü": torch.ones(1, requires_grad=True)},
    }
    keeps: dict[int, Groups] = {4: kinds, 900_000: {}, 17: {"a": {}, "b": {"x": stack[0]}}}
    save(tmp_path, 3, kinds, keeps)
    snapshot = found(tmp_path).snapshot
    assert snapshot.round == 3
    assert same(snapshot.state, kinds)
    assert list(snapshot.own) == [4, 17, 900_000]
    assert all(same(snapshot.own[client], groups) for client, groups in keeps.items())


def test_nothing_at_all_can_be_saved(tmp_path: Path) -> None:
    save(tmp_path, 1, {}, {})
    assert found(tmp_path).snapshot == Snapshot(1, {}, {})
    assert names(tmp_path) == {"round-000001.json", "state-000001.safetensors"}


def test_what_is_loaded_has_memory_of_its_own(tmp_path: Path) -> None:
    save(tmp_path, 1, state(1), {0: own(1)})
    snapshot = found(tmp_path).snapshot
    snapshot.state["model"]["w"].add_(1)
    snapshot.own[0]["personal"]["b"].add_(1)
    again = found(tmp_path).snapshot
    assert same(again.state, state(1))
    assert same(again.own[0], own(1))


def test_extra_comes_back(tmp_path: Path) -> None:
    extra = {"reached": True, "budget": 0.1 + 0.2, "calls": [[1, 2], []], "name": "é", "nothing": None}
    save(tmp_path, 1, state(1), {}, extra)
    assert found(tmp_path).extra == extra


def test_a_client_has_its_newest_version_and_old_files_stay_only_while_needed(tmp_path: Path) -> None:
    save(tmp_path, 1, state(1), {0: own(1), 1: own(1)})
    save(tmp_path, 2, state(2), {2: own(2)})
    save(tmp_path, 3, state(3), {0: own(3)})
    snapshot = found(tmp_path).snapshot
    assert {client: groups["personal"]["b"][0].item() for client, groups in snapshot.own.items()} == {0: 3, 1: 1, 2: 2}
    assert {name for name in names(tmp_path) if name.startswith("own")} == {
        "own-000001.safetensors",
        "own-000002.safetensors",
        "own-000003.safetensors",
    }
    save(tmp_path, 4, state(4), {1: own(4), 2: own(4)})
    save(tmp_path, 5, state(5), {})
    # nobody's newest version is in the files of rounds 1 and 2 any more, neither for round 4 nor for round 5
    assert names(tmp_path) == {
        "own-000003.safetensors",
        "own-000004.safetensors",
        *(f"{kind}-00000{round}.{end}" for round in (4, 5) for kind, end in KINDS),
    }
    assert {c: g["personal"]["b"][0].item() for c, g in found(tmp_path).snapshot.own.items()} == {0: 3, 1: 4, 2: 4}


KINDS = (("round", "json"), ("state", "safetensors"), ("versions", "safetensors"))


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_so_many_checkpoints_are_kept(tmp_path: Path, keep: int) -> None:
    for round in range(1, 6):
        save(tmp_path, round, state(round), {0: own(round)}, keep=keep)
    kept = {name for name in names(tmp_path) if name.startswith("round")}
    assert kept == {f"round-{round:06d}.json" for round in range(6 - keep, 6)}
    assert len(names(tmp_path)) == 4 * keep


def test_at_least_one_checkpoint_is_kept(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="keep = 0"):
        save(tmp_path, 1, state(1), {}, keep=0)


@pytest.mark.parametrize("kind", ["round", "state", "own", "versions"])
@pytest.mark.parametrize("harm", [truncate, empty, flip_a_byte, delete])
def test_a_damaged_checkpoint_is_passed_over_in_words(tmp_path: Path, harm: Callable[[Path], None], kind: str) -> None:
    save(tmp_path, 9, state(9), {0: own(9), 1: own(9)}, {"at": 9})
    save(tmp_path, 12, state(12), {1: own(12)}, {"at": 12})
    (path,) = tmp_path.glob(f"{kind}-000012.*")
    harm(path)
    loaded = found(tmp_path)
    assert loaded.snapshot.round == loaded.extra["at"] == 9
    assert same(loaded.snapshot.state, state(9))
    assert same(loaded.snapshot.own, {0: own(9), 1: own(9)})
    if (kind, harm) == ("round", delete):
        assert loaded.notes == []  # without its manifest it was never finished
    else:
        (note,) = loaded.notes
        assert note.startswith("The checkpoint of round 12 is damaged and was skipped: ")
        assert path.name in note


def test_damage_in_an_older_file_spoils_every_checkpoint_that_needs_it(tmp_path: Path) -> None:
    save(tmp_path, 1, state(1), {0: own(1)})
    save(tmp_path, 2, state(2), {1: own(2)})
    save(tmp_path, 3, state(3), {1: own(3)})
    flip_a_byte(tmp_path / "own-000001.safetensors")
    with pytest.raises(StoreError, match=r"No checkpoint in .* can be used.*round 3.*own-000001.*round 2.*start from"):
        load(tmp_path)
    assert {name for name in names(tmp_path) if name.startswith("round")} == {"round-000002.json", "round-000003.json"}


def test_every_single_flipped_bit_of_a_checkpoint_is_noticed_or_harmless(tmp_path: Path) -> None:
    save(tmp_path, 1, state(1), {0: own(1)})
    save(tmp_path, 2, state(2), {0: own(2)}, {"name": "é", "value": 0.25})
    whole = found(tmp_path)
    for path in sorted(tmp_path.glob("*-000002.*")):
        content = path.read_bytes()
        for place in range(len(content)):
            bit = 1 << (place % 8)
            path.write_bytes(content[:place] + bytes([content[place] ^ bit]) + content[place + 1 :])
            loaded = found(tmp_path)
            if loaded.snapshot.round == 2:  # white space of the manifest, or upper case of \\u00e9
                assert path.name == "round-000002.json"
                assert loaded.extra == whole.extra
                assert same(loaded.snapshot.own, whole.snapshot.own)
        path.write_bytes(content)


def test_a_run_goes_on_from_the_checkpoint_it_fell_back_to(tmp_path: Path) -> None:
    save(tmp_path, 4, state(4), {0: own(4), 1: own(4)})
    save(tmp_path, 6, state(6), {1: own(6), 2: own(6)})
    truncate(tmp_path / "state-000006.safetensors")
    assert found(tmp_path).snapshot.round == 4
    save(tmp_path, 7, state(7), {0: own(7)}, since=4)  # another past: clients 1 and 2 did not take part in it
    loaded = found(tmp_path)
    assert loaded.notes == []
    assert same(loaded.snapshot.own, {0: own(7), 1: own(4)})
    assert {name for name in names(tmp_path) if name.startswith("round")} == {"round-000004.json", "round-000007.json"}
    delete(tmp_path / "own-000007.safetensors")
    assert same(found(tmp_path).snapshot.own, {0: own(4), 1: own(4)})


def test_saving_the_same_round_again_replaces_it(tmp_path: Path) -> None:
    save(tmp_path, 1, state(1), {0: own(1)})
    save(tmp_path, 2, state(2), {0: own(2), 1: own(2)})
    save(tmp_path, 2, state(5), {0: own(5)})
    snapshot = found(tmp_path).snapshot
    assert same(snapshot.state, state(5))
    assert same(snapshot.own, {0: own(5)})


def test_a_checkpoint_does_not_build_on_a_damaged_one(tmp_path: Path) -> None:
    save(tmp_path, 1, state(1), {0: own(1)})
    save(tmp_path, 2, state(2), {0: own(2)})
    flip_a_byte(tmp_path / "versions-000002.safetensors")
    with pytest.raises(StoreError, match=r"round 2 .* is damaged .* round 3 builds on it. Run again"):
        save(tmp_path, 3, state(3), {1: own(3)})
    assert found(tmp_path).snapshot.round == 1


def test_what_a_killed_process_left_behind_is_removed_and_what_is_not_ours_stays(tmp_path: Path) -> None:
    save(tmp_path, 1, state(1), {0: own(1)})
    for name in ("state-000002.safetensors.part", "round-000002.json.part", "own-000002.safetensors", "notes.txt"):
        (tmp_path / name).write_bytes(b"half of someth")
    assert found(tmp_path).snapshot.round == 1
    save(tmp_path, 2, state(2), {})
    assert same(found(tmp_path).snapshot.own, {0: own(1)})
    assert names(tmp_path) == {
        "notes.txt",
        "own-000001.safetensors",
        *(f"{kind}-00000{round}.{end}" for round in (1, 2) for kind, end in KINDS),
    }


class Killed(BaseException):
    pass


def killer(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """From some call on, nothing more is written, synced, renamed or deleted: the process is dead."""
    calls = 0
    for module, name in ((checkpoint, "save_file"), (os, "fsync"), (os, "replace"), (Path, "unlink")):

        def deadly(*args: Any, honest: Callable[..., Any] = getattr(module, name), **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > after:
                raise Killed
            return honest(*args, **options)

        monkeypatch.setattr(module, name, deadly)


def test_a_process_may_be_killed_at_any_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finished, step = False, 0
    while not finished:
        folder = tmp_path / str(step)
        for round in (1, 2):
            save(folder, round, state(round), {round: own(round), 0: own(round)})
        with monkeypatch.context() as patch:
            killer(patch, after=step)
            try:
                save(folder, 3, state(3), {0: own(3)})
                finished = True
            except Killed:
                step += 1
        loaded = found(folder)
        reached = loaded.snapshot.round
        assert reached in ((3,) if finished else (2, 3))
        assert loaded.notes == []
        assert same(loaded.snapshot.state, state(reached))
        assert same(loaded.snapshot.own, {0: own(reached), 1: own(1), 2: own(2)})
        save(folder, 4, state(4), {0: own(4)})
        assert same(found(folder).snapshot.own, {0: own(4), 1: own(1), 2: own(2)})
        assert not list(folder.glob("*.part"))
    assert step > 12


def test_a_newer_format_asks_for_an_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1, state(1), {})
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "FORMAT", 2)
        save(tmp_path, 2, state(2), {})
    with pytest.raises(StoreError, match=r"has format 2.*up to 1.*update fedloom"):
        load(tmp_path)


def test_what_json_cannot_hold_is_refused_before_anything_changes(tmp_path: Path) -> None:
    save(tmp_path, 1, state(1), {})
    before = names(tmp_path)
    with pytest.raises(TypeError, match="JSON"):
        save(tmp_path, 1, state(2), {}, {"tensor": torch.ones(1)})
    assert names(tmp_path) == before


def test_a_group_with_a_slash_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"slash\. Got 'a/b'"):
        save(tmp_path, 1, {"a/b": {"w": torch.ones(1)}}, {})


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"round 1 cannot be written to .*file"):
        save(tmp_path / "file", 1, state(1), {})


def test_the_manifest_is_plain_json(tmp_path: Path) -> None:
    save(tmp_path, 12, state(1), {3: own(1)}, {"a": 1})
    manifest = json.loads((tmp_path / "round-000012.json").read_text())
    assert (manifest["format"], manifest["round"], manifest["extra"]) == (1, 12, {"a": 1})
    assert set(manifest["files"]) == {f"{kind}-000012.safetensors" for kind in ("state", "own", "versions")}
    assert all(len(digest) == 64 for digest in manifest["files"].values())


changes = st.sets(st.integers(0, 5))
steps = st.lists(
    st.one_of(
        st.tuples(st.just("save"), changes, st.integers(1, 3)),
        st.tuples(st.sampled_from(["state", "own", "versions", "round"]), changes, st.sampled_from([0, 1, 2, 3])),
    ),
    max_size=14,
)


@settings(max_examples=150, deadline=None)
@given(steps, st.integers(1, 3))
def test_any_history_of_saves_and_damage_ends_like_a_plain_dict(
    history: list[tuple[str, set[int], int]], keep: int
) -> None:
    """The model: for each round saved, the dict of all clients' values; damage goes back to the round before."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        saved: dict[int, dict[int, float]] = {}  # what checkpoints there are, oldest first
        current: dict[int, float] = {}
        round, tick = 0, 0.0
        for action, clients, number in history:
            tick += 1
            if action == "save":
                since = round
                round += number
                current = {**current, **dict.fromkeys(clients, tick)}
                changed = {client: own(tick) for client in clients}
                save(folder, round, state(tick), changed, {"tick": tick}, keep=keep, since=since)
                saved[round] = current
                saved = dict(list(saved.items())[-keep:])
            else:
                newest = folder / f"{action}-{round:06d}.{'json' if action == 'round' else 'safetensors'}"
                if len(saved) < 2 or not newest.exists():
                    continue
                (truncate, empty, flip_a_byte, delete)[number](newest)
                del saved[round]
                round = max(saved)
                current = saved[round]
            loaded = load(folder)
            if not saved:
                assert loaded is None
                continue
            assert loaded is not None
            assert loaded.snapshot.round == round
            assert {c: groups["personal"]["b"][0].item() for c, groups in loaded.snapshot.own.items()} == current
            assert loaded.snapshot.state["model"]["w"][0].item() == loaded.extra["tick"]
