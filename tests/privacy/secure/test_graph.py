"""All clients are neighbours up to 100; above, degree and threshold follow from Bell et al. 2020."""

from fractions import Fraction
from math import comb

import pytest

from fedloom.privacy.secure import graph
from fedloom.privacy.secure.graph import Graph, sparse
from tests.privacy.secure.helpers import session


def tail(population: int, marked: int, drawn: int, least: int) -> Fraction:
    """The probability of at least `least` marked ones among the drawn, exactly."""
    ways = sum(comb(marked, m) * comb(population - marked, drawn - m) for m in range(least, min(drawn, marked) + 1))
    return Fraction(ways, comb(population, drawn))


def test_up_to_100_clients_are_all_neighbours_and_hold_shares_of_themselves() -> None:
    full = Graph.of(session(100, 67), b"sid", tuple(range(100)))
    assert full.neighbours(3) == tuple(n for n in range(100) if n != 3)
    assert full.holders(3) == tuple(range(100))
    assert full.threshold == 67


def test_above_100_everyone_has_as_many_neighbours_and_neighbours_are_mutual() -> None:
    agreed, members = session(300, 201), tuple(range(5, 305))
    sparse_graph = Graph.of(agreed, b"sid", members)
    degree, threshold = sparse(300, graph.CORRUPT, 1 - 201 / 300) or (0, 0)
    for client in members:
        mine = sparse_graph.neighbours(client)
        assert len(set(mine)) == degree < 100
        assert client not in mine
        assert all(client in sparse_graph.neighbours(other) for other in mine)
    assert sparse_graph.threshold == threshold
    assert sparse_graph.holders(7) == sparse_graph.neighbours(7)


def test_neighbours_follow_from_the_session_s_number() -> None:
    agreed, members = session(300, 201), tuple(range(300))
    one, again, other = (Graph.of(agreed, sid, members).neighbours(0) for sid in (b"one", b"one", b"other"))
    assert one == again != other


@pytest.mark.parametrize(("clients", "corrupt", "lost"), [(101, 0.1, 0.33), (300, 0.1, 0.33), (1000, 0.2, 0.2)])
def test_degree_and_threshold_keep_the_stated_failure_rates(clients: int, corrupt: float, lost: float) -> None:
    degree, threshold = sparse(clients, corrupt, lost) or (0, 0)
    bad, gone = int(corrupt * clients), int(lost * clients)
    exposed = clients * tail(clients - 1, bad, degree, threshold)
    pairs = Fraction(clients * (clients - degree - 1), 2)
    apart = pairs * Fraction(comb(bad + gone, degree), comb(clients, degree))
    stuck = clients * (1 - tail(clients - 1, clients - 1 - gone, degree, threshold))
    assert exposed + apart <= Fraction(1, 2**graph.SECURITY)
    assert stuck <= Fraction(1, 2**graph.CORRECTNESS)
    assert clients * tail(clients - 1, bad, degree, threshold - 1) > Fraction(1, 2 ** (graph.SECURITY + 1))


def test_clients_for_which_no_sparse_graph_is_safe_are_all_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "CORRUPT", 0.6)
    assert sparse(101, 0.6, 1 - 51 / 101) is None
    assert Graph.of(session(101, 51), b"sid", tuple(range(101))).is_full
