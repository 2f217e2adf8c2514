"""`bench_tiers.py` with toy sizes."""

import json
import re

import pytest

from scripts import bench_tiers
from scripts.tier_bench.sizes import TINY, Sizes


def test_sizes_are_what_parts_are_about() -> None:
    for sizes, max_rows, step_tokens in ((Sizes(), 64, 8192), (TINY, 4, 64)):
        cold = min(2 * step_tokens // 16, sizes.num_blocks // 2)
        of_each = -(-sum(sizes.short) // 16)
        assert sizes.rows * of_each + cold <= sizes.num_blocks, "nothing is copied ahead of requests that fit"
        assert sizes.new_rows * -(-(sizes.new_prompt + sizes.num_output) // 16) <= sizes.num_blocks
        contexts = sizes.conversations * (sizes.first + (sizes.turns - 1) * sizes.turn)
        assert contexts >= (1.8 if sizes is TINY else 4) * 16 * sizes.num_blocks
        needed = sizes.long_rows * sum(sizes.long_answer)
        assert 4 * 16 * sizes.quarter_blocks <= needed < 5 * 16 * sizes.quarter_blocks
        at_once = min(max_rows, sizes.long_rows)
        assert sum(sizes.long_answer) <= 16 * sizes.quarter_blocks < at_once * sum(sizes.long_answer)


@pytest.mark.slow
def test_parts_find_their_rows_with_toy_sizes(tmp_path, monkeypatch, capsys) -> None:
    """But `reload`, as `disk` measures host memory too, and what measures steps and throughput as other parts do."""
    parts = ",".join(name for name in bench_tiers.PARTS if name not in ("reload", "launch", "beside", "reuse", "no-reuse"))
    monkeypatch.setenv("JAXLLM_CACHE_DIR", str(tmp_path / "cache"))
    path, table = tmp_path / "found.json", tmp_path / "table.md"
    monkeypatch.setattr(
        "sys.argv", ["bench_tiers.py", "--tiny", "--parts", parts, "--json", str(path), "--markdown", str(table)]
    )
    bench_tiers.main()
    found = json.loads(path.read_text())["rows"]
    rows = {row["name"]: row for row in found}
    assert len(rows) == len(found) == 22
    signed = ("host time that host memory adds", "first token, what two engines add", "blocks copied")
    assert all(row["value"] > 0 for name, row in rows.items() if not name.startswith(signed))
    assert rows["blocks copied in a cache that is never full"]["value"] == 0
    assert number(rows["6 requests in a quarter of their cache, with host memory"], "preemptions") > 0
    length, blocks = TINY.far_prompt, TINY.far_prompt // 16
    assert number(rows[f"first token, {length} tokens from files"], "blocks") == blocks
    assert number(rows[f"first token, {length} tokens from host memory, after files"], "of them") == 0
    assert "failed" not in rows[f"first token, {length} tokens, prefill and decode engine"]["note"]
    assert table.read_text() in capsys.readouterr().out


def number(row: dict, of: str) -> int:
    """The number before a word of a row's note."""
    found = re.search(rf"(\d+) {of}", row["note"])
    assert found is not None, row
    return int(found[1])
