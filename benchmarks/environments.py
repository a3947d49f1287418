"""One virtual environment per peer, made once and kept in a cache folder."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

# the packages of each pip call, in order: a later call may pin what an earlier one installed
RECIPES: dict[str, list[list[str]]] = {
    "flower": [["torch==2.13.0"], ["flwr[simulation]"]],
    "pfl": [["torch==2.13.0"], ["pfl[pytorch]"]],
    # fedjax's last release does not run with later jax
    "fedjax": [["fedjax"], ["jax==0.4.25", "jaxlib==0.4.25", "dm-haiku<0.0.13", "numpy<2", "scipy<1.13"]],
}
PACKAGES = {  # versions that belong into a table
    "fedloom": ["fedloom", "torch", "numpy"],
    "flower": ["flwr", "ray", "torch", "numpy"],
    "pfl": ["pfl", "torch", "numpy"],
    "fedjax": ["fedjax", "jax", "jaxlib", "dm-haiku", "numpy"],
}


class SetupFailed(Exception):
    """A peer could not be installed; the message says where the log is."""


def default_cache() -> Path:
    """Return the default folder of the environments."""
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "fedloom-bench"


def prepare(peer: str, cache: Path) -> Path:
    """The interpreter of a peer's environment, which is built first if it is missing or has other packages."""
    recipe = RECIPES[peer]
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stamp = hashlib.sha256(json.dumps([recipe, version]).encode()).hexdigest()[:12]
    folder = cache / f"{peer}-{stamp}"
    python = folder / "bin" / "python"
    if (folder / "complete").is_file():
        return python
    shutil.rmtree(folder, ignore_errors=True)  # do not use a half-built one
    cache.mkdir(parents=True, exist_ok=True)
    log = cache / f"{peer}-{stamp}.log"
    print(f"{peer}: installing into {folder} (log: {log}); this takes minutes and happens once", file=sys.stderr)
    venv.create(folder, with_pip=True)
    with open(log, "w") as out:
        for packages in recipe:
            command = [str(python), "-m", "pip", "install", "--disable-pip-version-check", *packages]
            if subprocess.run(command, stdout=out, stderr=subprocess.STDOUT).returncode:
                last = [line for line in log.read_text().splitlines() if line.strip()][-1:]
                raise SetupFailed(f"pip install {' '.join(packages)} failed: {' '.join(last)} (log: {log})")
    (folder / "complete").touch()
    return python


def versions(python: Path | str, system: str) -> dict[str, str]:
    """Installed versions, asked of the environment itself."""
    code = (
        "import json, platform, sys\n"
        "from importlib.metadata import PackageNotFoundError, version\n"
        "found = {'python': platform.python_version()}\n"
        "for name in sys.argv[1:]:\n"
        "    try: found[name] = version(name)\n"
        "    except PackageNotFoundError: pass\n"
        "print(json.dumps(found))"
    )
    done = subprocess.run([str(python), "-c", code, *PACKAGES[system]], capture_output=True, text=True, cwd="/")
    return json.loads(done.stdout) if done.returncode == 0 else {}


def main() -> None:
    """Build the environments of the peers named on the command line, or of all."""
    for peer in sys.argv[1:] or RECIPES:
        try:
            print(peer, prepare(peer, default_cache()), versions(prepare(peer, default_cache()), peer))
        except SetupFailed as error:
            print(f"{peer}: {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
