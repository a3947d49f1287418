"""Return a run to an earlier round: `fedloom rollback`."""

from __future__ import annotations

from pathlib import Path

from fedloom.errors import InputError, unknown
from fedloom.experiment import checkpoint
from fedloom.experiment.store import Store


def roll_back(folder: Path, round: int, cell: str | None = None) -> dict[str, int]:
    """Delete what came after a round, in one cell or in all that are beyond it; return how far each one was.

    Every such cell must have a whole checkpoint of the round, or nothing is changed. The caller holds the folder.
    """
    with Store(folder) as store:
        cells = {f"{row['label']}-{row['seed']}": row for row in store.cells()}
        if cell is not None and cell not in cells:
            raise unknown("cell", cell, cells)
        paths = {name: checkpoint.of_cell(folder, row["label"], row["seed"]) for name, row in cells.items()}
        done = {name: max(int(cells[name]["rounds_done"]), checkpoint.kept(path)[1]) for name, path in paths.items()}
        beyond = {name: done[name] for name in cells if cell in (None, name) and done[name] > round}
        if not beyond:
            raise InputError(
                f"Nothing came after round {round}: {', '.join(f'{n} has {done[n]}' for n in done)} rounds."
            )
        for name in beyond:
            usable = checkpoint.whole_rounds(paths[name])
            if round not in usable:
                rounds = ", ".join(map(str, usable)) or "none"
                raise InputError(
                    f"{name} has no checkpoint of round {round}. Kept: {rounds}. Set [run] keep_checkpoints to keep "
                    "more, or name another cell with --cell."
                )
        for name in beyond:
            checkpoint.forget_after(paths[name], round)
            store.forget_after(cells[name]["id"], round)
            store.set_status(cells[name]["id"], "waiting")  # what it ended with is gone
            store.set_status(cells[name]["id"], "stopped")
    return beyond
