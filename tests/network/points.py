"""The named points at which tests kill a process. `test_points.py` holds that the code passes exactly these."""

COORDINATOR_POINTS = (
    "coordinator.ask",  # before the clients of a call get their work
    "ledger.start",  # before it is recorded which clients start in an asynchronous round
    "update.received",  # an update is on the disk, but not accepted yet
    "ledger.accept",  # before accepted updates are committed
    "ledger.accepted",  # after that, before the agents get their answers
    "ledger.leave_out",  # before it is recorded which updates a round does without
    "ledger.take",  # before it is recorded which answers an asynchronous round takes
    "ledger.taken",  # after that, before any is added up
    "secure.advertise",  # before clients are asked for new keys
    "secure.share",  # before they get each other's keys
    "secure.mask",  # before they get each other's encrypted shares, and train
    "secure.confirm",  # before they learn who is in the sum
    "secure.unmask",  # before they give shares
    "secure.unmasked",  # the sum is known, but nothing of it is stored
    "privacy.charged",  # the ledger of ε has a new line, but nothing of the release is made
    "coordinator.aggregate",  # all updates have arrived, none is added up yet
    "coordinator.aggregated",  # they are added up, but there is no checkpoint yet
    "checkpoint.write",  # before a checkpoint's file is synced
    "checkpoint.rename",  # synced, but not renamed yet
    "checkpoint.renamed",  # renamed, but the folder is not synced yet
    "ledger.forget",  # before updates that were added up are deleted
)
AGENT_POINTS = (
    "agent.asked",  # work has arrived
    "agent.trained",  # before any of the answer is stored
    "own.write",  # before a client's new state is synced
    "own.rename",  # synced, but not renamed yet
    "own.renamed",  # renamed, but the answer is not sent yet
    "secure.answer",  # before a stage of a secure sum is answered
    "agent.answered",  # the answer was accepted
    "audit.written",  # the audit log has a new line
)
