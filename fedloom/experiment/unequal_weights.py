"""Algorithms whose means weigh clients in different ways, as their papers do: a part of their difference."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

FACT = "weights of algorithms"  # of a run: label → how its mean weighs clients
BEGINNING = "Algorithms weigh clients in different ways"
MUCH_LARGER = 1.1  # a client than another: below, weights by examples are about equal


def caution(ways: Mapping[str, str], sizes: Sequence[int], where: str = "") -> Iterator[str]:
    """Say so if these algorithms weigh clients in different ways, and clients have different numbers of examples.

    `where` is such as " in seed 1", if these are the sizes of one seed's clients.

    >>> list(caution({"fedavg": "examples", "scaffold": "examples"}, [10, 20]))
    []
    """
    weighed: dict[str, list[str]] = {}
    for label, way in ways.items():
        weighed.setdefault(way, []).append(label)
    if len(weighed) > 1 and sizes and max(sizes) > MUCH_LARGER * min(sizes):
        listed = " and ".join(f'"{way}" for {", ".join(labels)}' for way, labels in weighed.items())
        yield (
            f"{BEGINNING} (weights = {listed}), and clients have {min(sizes):,} to {max(sizes):,} training "
            f"examples{where}: a part of their difference may come from that. To compare them alike, "
            f'set weights = "examples" or "uniform" for each in [algorithm].'
        )
