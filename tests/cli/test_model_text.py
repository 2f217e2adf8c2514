"""How `jaxllm inspect` shows layers."""

import json

import pytest

from jaxllm.cli import model_text
from jaxllm.cli.main import main


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ([], ""),
        ([3], "3"),
        ([0, 1], "0, 1"),
        (range(48), "0-47"),
        ([0, 2, 4], "0, 2, 4"),
        (range(5, 48, 6), "5, 11, …, 47"),
        ([9, 10, 12, 13, 14, 15, 16, 18], "9, 10, 12-16, 18"),
    ],
)
def test_numbers_are_short(given: list[int], shown: str) -> None:
    assert model_text.numbers(given) == shown


def test_a_model_of_alternating_layers_is_shown_in_100_columns(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {
        "architectures": ["Gemma3ForCausalLM"],
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 24,
        "sliding_window": 32,
        "max_position_embeddings": 256,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["inspect", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert max(len(line) for line in shown.splitlines() if not line.startswith("model ")) <= 100
    lines = " ".join(shown.split())
    assert "layers 0-4, 6-10, 12-16, 18-22: attention (num_heads 8, num_kv_heads 4, head_dim 256, rope, window 32, " in lines
    assert "layers 5, 11, …, 23: attention (num_heads 8, num_kv_heads 4, head_dim 256, rope (theta 1000000.0), head" in lines
    assert "full attention, layers 5, 11, …, 23: 32.0 KiB a token, at most " in lines
