"""The operator's page of a coordinator in a real browser: locked, live, and with a question before each deed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fedloom.network.coordinator.agent_pool import AgentPool
from fedloom.network.coordinator.ledger import Ledger
from fedloom.network.coordinator.network_folder import invite, withdraw
from fedloom.network.coordinator.serve import HttpsServer
from fedloom.network.protocol.certificates import local_authority
from fedloom.network.protocol.messages import Failure
from fedloom.network.protocol.signatures import Verifier
from fedloom.network.protocol.token import Token
from tests.browser.test_page import Open, show
from tests.network.conftest import HELLO, World
from tests.watch.growing_run import HOSTILE, GrowingRun


class ServedWorld(World):
    """A coordinator with a port, over TLS."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.said = folder, []
        self.ledger = Ledger(folder / "network")
        self.pool = AgentPool(self.ledger, self.said.append)
        self.verifier, self.operator = Verifier(), Token.new("")
        made = local_authority(folder / "network")
        self.server = HttpsServer(self.pool, "127.0.0.1", 0, made, self.operator.digest)
        self.url = f"https://127.0.0.1:{self.server.number}/watch/"


@pytest.fixture
def served(tmp_path: Path) -> Iterator[ServedWorld]:
    made = ServedWorld(tmp_path)
    with made.server:
        yield made
    made.ledger.close()


def log_in(page: Any, token: Token) -> None:
    page.get_by_role("textbox", name="The operator’s token").fill(str(token))
    page.get_by_role("button", name="Use it").click()
    page.locator("#tab-agents").wait_for()


def test_the_operator_sees_agents_live_and_is_asked_before_one_is_revoked(served: ServedWorld, open_page: Open) -> None:
    kerry, hostile = served.speaker("kerry"), served.speaker(HOSTILE[:60])
    for agent in (kerry, hostile):
        agent.hello(HELLO.model_copy(update={"versions": {"torch": HOSTILE, HOSTILE: "1"}}))
    page = open_page(served.url, ignores=("401",))
    page.get_by_role("heading", name="The operator’s token").wait_for()
    assert "kerry" not in page.content()
    log_in(page, served.operator)
    page.get_by_role("row", name="kerry").get_by_text("idle").wait_for()
    page.get_by_text("The run has not begun").wait_for()
    call = served.open_call(kerry, hostile)
    call.needed = 2
    page.get_by_text("0 of 2 clients have answered; the round needs 2.").wait_for()
    page.get_by_role("row", name="kerry").get_by_text("working").wait_for()
    served.pool.agents[hostile.signer.agent].seen -= 3600
    page.get_by_text("a test: the quorum is lost unless agents come back.").wait_for()
    assert page.locator("main script, main img").count() == 0
    page.get_by_role("button", name="Revoke kerry").click()
    page.get_by_role("button", name="Cancel").click()
    assert served.ledger.revoked() == set()
    page.get_by_role("button", name="Revoke kerry").click()
    page.get_by_role("button", name="Revoke the agent").click()
    page.get_by_role("row", name="kerry").get_by_text("revoked").wait_for()
    assert served.ledger.revoked() == {kerry.signer.agent}
    page.get_by_role("button", name="Invite an agent").click()
    page.get_by_text("fedloom join").wait_for()
    (token,) = (path.read_text().strip() for path in (served.folder / "network" / "tokens").glob("*.token"))
    assert f"--token {token} " in page.locator("pre").inner_text()


def test_errors_do_not_hide_alerts_and_both_go(served: ServedWorld, open_page: Open) -> None:
    kerry = served.speaker("kerry")
    kerry.hello()
    (token,) = invite(served.ledger, 1)
    page = open_page(served.url, ignores=("401", "409"))
    log_in(page, served.operator)
    served.open_call(kerry).needed = 1
    served.pool.agents[kerry.signer.agent].seen -= 3600
    alert = page.get_by_text("a test: the quorum is lost unless agents come back.")
    alert.wait_for()
    page.get_by_role("button", name="Withdraw").click()
    page.get_by_role("button", name="Withdraw the token").wait_for()
    withdraw(served.ledger, token.stem)  # somebody else is faster
    page.get_by_role("button", name="Withdraw the token").click()
    page.locator("#errors").get_by_text("token").wait_for()
    assert alert.is_visible()
    page.get_by_role("button", name="Close").click()
    assert page.locator("#errors").inner_text() == ""
    GrowingRun(served.folder).add(1)
    page.locator("#tab-curves").wait_for()
    show(page, "curves")
    assert alert.is_visible()  # in every view
    kerry.hello()
    alert.wait_for(state="hidden")


@pytest.mark.parametrize("width", [390, 2560])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_run_appears_beside_the_agents_when_it_begins(
    served: ServedWorld, open_page: Open, width: int, scheme: str
) -> None:
    long = served.speaker("a-very-long-name-of-an-institute-" * 3)
    long.hello()
    page = open_page(served.url, width, scheme, ignores=("401",))
    log_in(page, served.operator)
    page.get_by_text("The run has not begun").wait_for()
    GrowingRun(served.folder).add(2)
    page.locator("#tab-curves").wait_for()
    show(page, "curves")
    assert page.locator(".chart polyline").count() == 2
    show(page, "agents")
    served.open_call(long, clients=2).needed = 2
    refuses = Failure(ask="ask", clients=(0,), kind="refused", message="[policy] refuses this for a long reason. " * 5)
    for _ in range(3):
        served.pool.fail(long.signer.agent, refuses)
    page.get_by_text("refused: [policy] refuses this").wait_for()
    page.get_by_text("refused 3 times within an hour").wait_for()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_keeps_people_out(
    served: ServedWorld, open_page: Open, barriers: Callable[[Any], list[str]], scheme: str
) -> None:
    kerry = served.speaker("kerry")
    kerry.hello()
    invite(served.ledger, 1)
    page = open_page(served.url, 1280, scheme, ignores=("401",))
    page.get_by_role("heading", name="The operator’s token").wait_for()
    assert barriers(page) == []
    log_in(page, served.operator)
    served.open_call(kerry).needed = 1
    served.pool.agents[kerry.signer.agent].seen -= 3600
    page.get_by_text("a test: the quorum is lost unless agents come back.").wait_for()
    assert barriers(page) == []
    page.get_by_role("button", name="Revoke kerry").click()
    assert barriers(page) == []
