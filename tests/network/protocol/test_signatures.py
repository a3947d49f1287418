"""Keys in files."""

from __future__ import annotations

import stat
from pathlib import Path

from fedloom.network.protocol.certificates import fingerprint, local_authority
from fedloom.network.protocol.signatures import Signer


def test_only_the_owner_can_read_files_with_keys(tmp_path: Path) -> None:
    signer = Signer(tmp_path / "state" / "agent.key")
    assert Signer(tmp_path / "state" / "agent.key").public == signer.public
    made = local_authority(tmp_path / "ca")
    for path in (tmp_path / "state" / "agent.key", made.key, made.certificate):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert local_authority(tmp_path / "ca").fingerprint == made.fingerprint == fingerprint(made.authority)
