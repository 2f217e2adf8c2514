"""`bench_images.py` with toy sizes, and what it makes of its figures."""

import json
import time
from types import SimpleNamespace

import pytest

from jaxllm.models.load_config import load_model_config
from scripts import bench_images
from scripts.bench_images import PARTS, encode_flops
from scripts.measuring import seeing_models
from scripts.measuring.parts import Row, limited


def test_a_row_tells_whether_its_goal_is_met() -> None:
    assert Row("encode", 44.9, "ms", 45).cells() == ["encode", "44.90 ms", "≤ 45: met", ""]
    assert Row("encode", 45.1, "ms", 45, note="slow").cells() == ["encode", "45.10 ms", "≤ 45: missed", "slow"]
    assert Row("text", 0.9899, "×", 0.99, more=True).cells() == ["text", "0.9899 ×", "≥ 0.99: missed", ""]
    assert Row("together", 5123.4, "tokens/s").cells() == ["together", "5 123 tokens/s", "–", ""]


def test_operations_of_an_encoder_are_those_of_its_products(tmp_path) -> None:
    vision = load_model_config(seeing_models.write(tmp_path / "model", seeing_models.QWEN3_VL_8B)).vision
    D, F, P = 1152, 4304, 8160
    layers = 27 * (2 * P * D * (4 * D + 2 * F) + 4 * P * P * D)
    mergers = 4 * 2 * (P // 4) * (4608 * 4608 + 4608 * 4096)
    assert encode_flops(vision, P) == layers + mergers + 2 * P * 768 * D
    assert 15e12 < encode_flops(vision, P) < 16e12


def test_the_twin_of_a_model_that_sees_images_has_its_text_model(tmp_path) -> None:
    config = seeing_models.QWEN3_VL_8B
    seeing, twin = (
        load_model_config(seeing_models.write(tmp_path / name, each))
        for name, each in (("seeing", config), ("twin", seeing_models.text_twin(config)))
    )
    same = ("hidden_size", "num_layers", "vocab_size", "tie_word_embeddings", "dtype")
    assert {name: getattr(seeing, name) for name in same} == {name: getattr(twin, name) for name in same}
    assert seeing.vision is not None and twin.vision is None
    assert seeing.attentions[0].head_dim == twin.attentions[0].head_dim


def test_what_takes_too_long_is_ended() -> None:
    with pytest.raises(TimeoutError, match=r"longer than 0\.05 s"), limited(0.05):
        time.sleep(5)
    with limited(0.05):
        pass
    time.sleep(0.1)


@pytest.mark.slow
def test_parts_find_their_rows_with_toy_sizes(tmp_path, monkeypatch, capsys) -> None:
    """But those that start further engines, for what the others measure of theirs."""
    monkeypatch.setenv("JAXLLM_CACHE_DIR", str(tmp_path / "cache"))
    path, parts = tmp_path / "found.json", ",".join(name for name in PARTS if name not in ("first", "text"))
    monkeypatch.setattr(
        "sys.argv",
        ["bench_images.py", "--tiny", "--parts", parts, "--json", str(path), "--markdown", str(tmp_path / "table.md")],
    )
    bench_images.main()
    found = json.loads(path.read_text())
    rows = {row["name"]: SimpleNamespace(**row) for row in found["rows"]}
    assert len(rows) == len(found["rows"]) == 19 and all(row.value > 0 for row in rows.values())
    assert rows["an image of 256 x 160 in 5 requests: encoded"].value == 1
    told = (tmp_path / "table.md").read_text()
    assert told in capsys.readouterr().out and told.count("\n| ") == len(rows) + 1
    assert set(PARTS) == {"first", "programs", "encode", "between", "together", "same", "prepare", "text"}
