"""Clients as machines, and the virtual clock that counts what they take."""
