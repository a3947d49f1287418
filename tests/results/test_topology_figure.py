"""The figure of a peer-to-peer graph."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from matplotlib.figure import Figure

from fedloom.results import topology_figure


def test_there_is_a_panel_for_each_graph_with_its_neighbours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[Figure] = []
    write = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda figure, *a, **k: (saved.append(figure), write(figure, *a, **k)))
    line = torch.eye(3) + torch.tensor([[0, 1, 0], [1, 0, 1], [0, 1, 0]])
    topology_figure.draw({"all": torch.ones(4, 4), "line": line}, tmp_path / "graph.png")
    everybody, chain = saved[0].axes
    assert everybody.get_title() == "all: 4 clients, 3 neighbours"
    assert chain.get_title() == "line: 3 clients, 1 to 2 neighbours"
    assert (len(everybody.lines), len(chain.lines)) == (6, 2)  # a line for each pair that exchanges models
    assert (tmp_path / "graph.png").read_bytes().startswith(b"\x89PNG")
