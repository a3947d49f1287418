"""What cannot even be imported where an extra is not installed is not searched for doctests."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("flwr") else ["fedloom/flower/*"]

pytest_plugins = ["tests.run_fixtures"]  # a small finished run that several folders of tests read
