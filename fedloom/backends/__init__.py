"""Where clients are computed."""
