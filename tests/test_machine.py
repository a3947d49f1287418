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
