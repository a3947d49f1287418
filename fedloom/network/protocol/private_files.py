"""Files that only their owner may read: keys, tokens, certificates, what an agent knows about its coordinator."""

from __future__ import annotations

import os
from pathlib import Path

from fedloom.files import write_atomically


def write_private(path: Path, content: bytes) -> None:
    """Write a file of mode 0600; a crash leaves the old content or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    before = os.umask(0o077)
    try:
        write_atomically(path, content)
    finally:
        os.umask(before)
