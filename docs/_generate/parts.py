"""The generated parts of pages, by the name that a page uses in `<!-- generated: NAME -->`."""

from __future__ import annotations

import re
from collections.abc import Callable

from _generate import algorithms, command_line, experiment_file, messages, package, store

PARTS: dict[str, Callable[[], str]] = {
    "experiment_file": experiment_file.keys,
    "compression": experiment_file.compression,
    "sources": experiment_file.sources,
    "partitions": experiment_file.partitions,
    "algorithm_overview": algorithms.overview,
    "algorithms": algorithms.algorithms,
    "rules": algorithms.rules,
    "command_line": command_line.commands,
    "store": store.tables,
    "messages": messages.fields,
    "package": package.modules,
}


def filled(markdown: str) -> str:
    """Fill the generated parts into the text of a page."""
    return re.sub(r"<!-- generated: (\w+) -->", lambda found: PARTS[found[1]](), markdown)
