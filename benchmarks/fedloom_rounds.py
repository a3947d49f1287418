"""FedAvg rounds in fedloom, on request: the same work as the peers', with the vector backend."""

from __future__ import annotations

import sys
import tempfile
from argparse import Namespace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "peers"))

import work as works
from protocol import Line
from settings import add_settings, settings


def main() -> None:
    """Load everything, say so, and run until the parent ends the run."""
    line = Line()
    from fedloom.backends.vector import Workers
    from fedloom.machine import cores

    parser = works.arguments(__doc__)
    parser.add_argument("--cohort", type=int, help="clients a round, instead of the work's")
    parser.add_argument("--hidden", type=int, help="a net of two hidden layers of this width instead of the work's")
    add_settings(parser)
    options = parser.parse_args()
    if options.evaluate:
        stored(line, options)
    else:
        rounds(line, options, Workers(options.workers or cores()))  # they load torch while this process loads the data


def rounds(line: Line, options: Namespace, workers: object) -> None:
    """Nothing but rounds."""
    from fedloom_work import NOTHING, reference, setup_for

    import fedloom as fl
    from fedloom.backends.vector import Vector

    chosen = settings(options)
    work = reference(
        options.work, options.data, options.partition, options.lr, cohort=options.cohort, hidden=options.hidden
    )
    setup = setup_for(work, chosen["group"])
    backend = Vector(work.federation, work.task, setup, workers)
    records = fl.fit(
        work.federation,
        work.task,
        work.algorithm,
        10**9,
        seed=options.seed,
        sampling=work.sampling,
        evaluation=NOTHING,
        backend=backend,
    )
    line.ready(parameters=work.task.parameters, workers=len(workers), group=setup.group)
    while line.wait():
        next(records)
        line.done()
    backend.close()


def stored(line: Line, options: Namespace) -> None:
    """A whole run as a user would start it, with evaluation on the server in every round, store and checkpoints."""
    from fedloom_work import reference

    import fedloom as fl
    from fedloom.experiment.progress import Silent

    class OnOrder(Silent):
        """Reports each round before it is stored, so that storing a round counts in the next."""

        def step(self, cell: str, round: int, values: dict[str, float], seconds: float) -> None:
            line.done(accuracy=values["accuracy"])
            self.more = line.wait()

    order = OnOrder()
    work = reference(options.work, options.data, options.partition, options.lr)
    line.ready(parameters=work.task.parameters, **settings(options))
    if line.wait():
        with tempfile.TemporaryDirectory() as folder:
            fl.run(
                work.federation,
                work.task,
                {"fedavg": work.algorithm},
                10**6,
                seeds=[options.seed + 1],
                cohort=work.sampling,
                evaluate=fl.Evaluation(splits=(), server=("test",)),
                out=folder,
                progress=order,
                should_stop=lambda: not order.more,
                **settings(options),
            )


if __name__ == "__main__":
    main()
