"""`bench_speech.py` with toy sizes."""

import json

import pytest

from jaxllm.layers.build import num_parameters
from jaxllm.models.load_config import load_model_config
from scripts import bench_speech
from scripts.measuring import hearing_models


@pytest.mark.parametrize(
    ("name", "billions"), [("whisper-large-v3", 1.543), ("whisper-large-v3-turbo", 0.809), ("whisper-small", 0.242)]
)
def test_models_have_the_sizes_of_public_ones(tmp_path, name, billions) -> None:
    config = load_model_config(hearing_models.write(tmp_path / "model", bench_speech.MODELS[name]))
    assert num_parameters(config) / 1e9 == pytest.approx(billions, abs=0.001)


@pytest.mark.slow
def test_every_part_finds_its_rows_with_toy_sizes(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("JAXLLM_CACHE_DIR", str(tmp_path / "cache"))
    path, table = tmp_path / "found.json", tmp_path / "table.md"
    monkeypatch.setattr("sys.argv", ["bench_speech.py", "--tiny", "--json", str(path), "--markdown", str(table)])
    bench_speech.main()
    rows = json.loads(path.read_text())["rows"]
    assert len({row["name"] for row in rows}) == len(rows) == 12 and all(row["value"] >= 0 for row in rows)
    assert table.read_text() in capsys.readouterr().out
