"""The coordinator: one HTTPS port, a ledger, checks of every update."""
