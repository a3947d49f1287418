"""Settings of a process that computes clients, and the facts recorded with a run."""

import os

import pytest
import torch

import fedloom
from fedloom import machine
from fedloom.errors import InputError


def test_a_code_path_that_you_have_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    machine.prepare_environment()
    assert os.environ["MKL_CBWR"] == "COMPATIBLE"


def test_without_one_the_code_path_is_fixed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MKL_CBWR", raising=False)
    machine.prepare_environment()
    assert os.environ["MKL_CBWR"] in ("AVX2", "AVX512")


def test_one_thread_computes_and_the_others_come_back_at_the_end() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with machine.computing():
            with machine.computing():
                assert torch.get_num_threads() == 1
            assert torch.get_num_threads() == 1
            assert (torch.tensor(1e-40) * 1.0).item() == 0.0  # denormal numbers are flushed
        assert torch.get_num_threads() == 2
        assert (torch.tensor(1e-40) * 1.0).item() != 0.0
    finally:
        torch.set_num_threads(before)


def test_an_error_does_not_leave_the_settings_behind() -> None:
    before = torch.get_num_threads()
    with pytest.raises(RuntimeError, match="inside"), machine.computing():
        raise RuntimeError("inside")
    assert torch.get_num_threads() == before


def test_an_automatic_device_exists_and_an_unknown_one_is_refused() -> None:
    assert machine.device("auto") in ("cpu", "cuda")
    assert machine.device("cpu") == "cpu"
    with pytest.raises(InputError, match=r'\[run\] device = "abacus" cannot be used here'):
        machine.device("abacus")


def test_the_facts_name_what_the_bits_of_a_result_depend_on() -> None:
    found = machine.facts()
    assert found["fedloom"] == fedloom.__version__
    assert found["torch"] == torch.__version__
    assert found["cores"] == machine.cores() >= 1
    assert found["mkl_cbwr"] == os.environ.get("MKL_CBWR", "")


def test_more_workers_than_the_machine_can_hold_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "cores", lambda: 2)
    monkeypatch.setattr(machine, "free_memory", lambda: 23_000_000_000)
    assert [machine.worker_count(wanted) for wanted in ("auto", 1, 16)] == [2, 1, 16]
    with pytest.raises(
        InputError, match=r"workers = 200 is more than .* 2 cores and 23\.0 GB of free memory .* for 16,"
    ):
        machine.worker_count(200)
    monkeypatch.setattr(machine, "free_memory", lambda: 600_000_000)
    with pytest.raises(InputError, match=r"workers = 3 is more than .* 0\.6 GB of free memory are enough for 2,"):
        machine.worker_count(3)
    monkeypatch.setattr(machine, "free_memory", lambda: 1)
    assert machine.worker_count("auto") == 1


def test_free_memory_is_some_of_what_the_machine_has() -> None:
    free = machine.free_memory()
    assert free is not None
    assert 1_000_000 < free < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
