"""What the server of `forked.py` imports and computes once, so that the processes that it forks need not."""

import importlib

from fedloom.experiment.experiment_file import parse
from fedloom.network.protocol.code_fingerprint import code_hashes

for name in (
    "anyio._backends._asyncio",
    "cryptography.hazmat.backends.openssl",
    "fedloom.network.agent.agent",
    "fedloom.network.coordinator.rehearsal",
    "fedloom.results.report",
    "httpcore",
    "matplotlib.backends.backend_svg",
    "matplotlib.pyplot",
    "PIL.PpmImagePlugin",
    "pydantic.v1",
    "sklearn.datasets",
    "uvicorn.loops.auto",
    "uvicorn.protocols.http.auto",
):
    importlib.import_module(name)

# a cache keeps the hash of every file that clients of such an experiment run
code_hashes(
    parse(
        {
            "data": {"source": "digits"},
            "task": {"model": "digits_mlp"},
            "algorithm": {"fedavg": {}, "scaffold": {}},
            "rounds": 1,
        }
    )
)
