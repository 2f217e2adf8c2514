"""The rehearsed attacks: a server with all its protection holds, and one without is found out."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxllm.async_llm import AsyncLLM
from jaxllm.cli.main import command_parser
from scripts import rehearse_attacks
from scripts.attacking import target
from scripts.attacking.groups import ATTACKS
from server.options import server_flags
from tests.helpers.live_server import LiveServer
from tests.helpers.scripted_core import fake_core
from tests.helpers.tiny_tokenizers import write_tokenizer

QUICK = [attack for attack in ATTACKS.values() if attack.is_quick]
NEEDS_A_CHAT_TEMPLATE = {"others-responses", "full-store", "hostile-bodies"}


class InProcess(target.Target):
    """Servers of this process over a fake engine, with these options and those of the attack."""

    def __init__(self, directory: Path, **weaker: Any):
        super().__init__()
        self._directory, self._weaker = directory, weaker

    def server(self, *flags: str, fresh: bool = False) -> Any:
        """A separate server for each attack."""
        self.close()
        given = vars(command_parser("serve").parse(["demo", *flags]))
        names = {flag.name for flag in server_flags()}
        options = {name: value for name, value in given.items() if name in names and value is not None}
        engine = self._stack.enter_context(AsyncLLM(core=fake_core(self._directory, max_model_len=2048)))
        server: Any = self._stack.enter_context(LiveServer.start(engine, **options | self._weaker))
        server.pids = lambda module: []
        return server


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("attacked"))


@pytest.fixture
def attacked(tokenizer: Path) -> Iterator[Any]:
    """Makes targets that are weaker by some options."""
    with contextlib.ExitStack() as stack:
        yield lambda **weaker: stack.enter_context(contextlib.closing(InProcess(tokenizer, **weaker)))


def test_all_attacks_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert rehearse_attacks.main(["--list"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in listed] == [attack.name for attack in rehearse_attacks.in_order()]
    assert len(listed) == len(ATTACKS)


@pytest.mark.slow
@pytest.mark.parametrize("name", [attack.name for attack in QUICK if attack.name not in NEEDS_A_CHAT_TEMPLATE])
def test_a_server_holds_against_quick_attacks(
    attacked: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    report = tmp_path / "report.json"
    assert rehearse_attacks.main(["--only", name, "--json", str(report)], target=attacked()) == 0, capsys.readouterr().out
    [found] = json.loads(report.read_text())
    assert found["held"] and found["checks"]


@pytest.mark.parametrize(
    ("name", "weaker"),
    [
        ("rebinding", {"allowed_hosts": ["*"]}),
        ("preflight", {"allowed_origins": ["*"]}),
        ("wrong-keys", {"api_key": None}),
    ],
)
@pytest.mark.slow
def test_a_server_without_protection_does_not_hold(
    attacked: Any, capsys: pytest.CaptureFixture[str], name: str, weaker: dict[str, Any]
) -> None:
    assert rehearse_attacks.main(["--only", name], target=attacked(**weaker)) == 1
    assert "| NO |" in capsys.readouterr().out


def test_an_attack_that_could_not_be_made_did_not_hold(capsys: pytest.CaptureFixture[str]) -> None:
    class Gone(target.Target):
        def server(self, *flags: str, fresh: bool = False) -> Any:
            raise OSError("no server")

    assert rehearse_attacks.main(["--only", "metrics-names"], target=Gone()) == 1
    assert "no server" in capsys.readouterr().out
