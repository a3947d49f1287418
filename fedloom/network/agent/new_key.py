"""A new key for an agent, which the coordinator accepts because the old one signs for it."""

from __future__ import annotations

from pathlib import Path

from fedloom.files import write_private
from fedloom.network.agent.audit_log import NEW_KEY, AuditLog
from fedloom.network.agent.connection import Connection
from fedloom.network.agent.enrolment import registered
from fedloom.network.agent.unsigned_requests import tls
from fedloom.network.protocol.messages import NewKey
from fedloom.network.protocol.rejection import Rejected
from fedloom.network.protocol.signatures import Signer, new_key_text


def next_key(state: Path) -> Path:
    """Return the file of the key that will follow; it is there while the change is not finished."""
    return state / "agent.key.next"


def change_key(state: Path, connection: Connection | None = None) -> None:
    """Replace an agent's key, or finish a change that was interrupted."""
    known, old, new = registered(state), Signer(state / "agent.key"), Signer(next_key(state))
    old.agent = new.agent = known["agent"]
    connection = connection or Connection(known["url"], old, tls(known["authority"]))
    try:
        connection.post("/v1/key", NewKey(public_key=new.public, proof=new.sign(new_key_text(known["agent"]))))
    except Rejected as error:
        if error.code == "begun":  # the coordinator knows the old key, so the agent can go on with it
            next_key(state).unlink()
        if error.code != "signature":
            raise
        connection.signer = new  # a process may have been killed after the coordinator accepted it
        connection.get("/v1/plan")
    finally:
        connection.close()
    if not (state / "mark.key").is_file():  # marks of the data must not change with the key
        write_private(state / "mark.key", (state / "agent.key").read_bytes())
    audit = AuditLog(state / "audit.jsonl", new)
    if not any(event.get("event") == NEW_KEY and event.get("before") == old.public for event in audit.events()):
        audit.write(NEW_KEY, before=old.public)
    next_key(state).replace(state / "agent.key")
