"""Why the coordinator rejects a request or an update: one exception, its codes, and the HTTP status of each.

A request that is not authentic has status 401. An update that does not count has status 422 and one of these codes:
malformed; not-asked (the agent was not asked about this client); late (the round is over, or belongs to another
attempt); duplicate (another answer of this client was accepted or rejected); keys, shape or dtype (not what the method
returns); not-finite; norm; weight; ticket (the client's state has the wrong version); metrics.
"""

from __future__ import annotations

from fedloom.errors import FedloomError

STATUS = {
    "unknown": 401,  # the agent is not enrolled
    "revoked": 401,
    "unsigned": 401,  # a header of the signature is missing, malformed or sent twice
    "signature": 401,
    "replayed": 401,
    "body": 401,  # the body is not the one that was signed
    "session": 401,  # signed for another process of the coordinator: sign again and repeat
    "clock": 401,  # signed at another time: correct the clock, sign again and repeat
    "token": 401,
    "mismatch": 409,  # the agent's data does not fit the run
    "begun": 409,  # a new key must wait until the run, which has secure aggregation, is over
    "twice": 409,  # another process uses the agent's key
    "hello": 409,  # the coordinator restarted: say hello first
    "slow": 408,  # the body is sent too slowly
    "too-large": 413,
    "encoding": 415,
    "guesses": 429,  # too many wrong tokens came from this address: wait
    "busy": 503,  # another answer of the same client is being stored, or too many messages of the agent: repeat
    "disk": 507,  # the coordinator cannot write: repeat
}


class Rejected(FedloomError):
    """The coordinator rejects a request or an update. Both sides see the code and the message."""

    def __init__(self, code: str, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.code, self.message = code, message
        self.status = STATUS.get(code, 422) if status is None else status
