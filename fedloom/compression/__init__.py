"""Compression of what clients send and receive."""
