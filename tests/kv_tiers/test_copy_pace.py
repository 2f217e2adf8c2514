"""Copies to the devices during decodes: how many blocks a step gets, by what steps took."""

from jaxllm.device_ops import FinishedCopy, ScatterBlocks, StageBlocks
from jaxllm.kv_tiers.copy_pace import SHARE, CopyPace
from jaxllm.kv_tiers.host_tier import HostTier
from tests.helpers.fake_copies import AlwaysWorth
from tests.kv_tiers.test_host_tier import Copies


def test_a_step_gets_as_many_blocks_as_add_little_to_it() -> None:
    pace = CopyPace(2)
    pace.note(40, 1.0)
    assert pace.most == 2, "nothing is known without plain steps"
    for _ in range(40):
        pace.note(0, 0.008)
    pace.note(2, 0.008)
    assert pace.most == 4, "they cost nothing, as far as is known"
    for _ in range(40):
        pace.note(4, 0.008 + 4 * 0.0001)
    assert pace.most == round(SHARE * 0.008 / 0.0001)
    for _ in range(40):
        pace.note(8, 0.008 + 8 * 0.001)
    assert pace.most == 2, "a part is copied in any case"
    for _ in range(40):
        pace.note(0, 0.1)
    assert pace.most == 10, "steps are longer now"


def test_parts_wait_for_the_next_step_where_requests_decode() -> None:
    copies = Copies(20)
    copies.num_staging = 9  # type: ignore[misc]
    tier = HostTier(copies, AlwaysWorth(), num_cold=0)  # type: ignore[arg-type]
    names = [bytes([index]) for index in range(8)]
    for name in names:
        content = tier.contents.add(name)
        assert content is not None
        tier.contents.make_ready(content)
        tier.contents.release(content)
    tier.load(range(8), names)
    counts = []
    for step_id in range(1, 8):
        ops = [*tier.begin_step(step_id, step_id - 1, decodes=step_id < 4).ops, *tier.end_step()]
        staged = [op for op in ops if isinstance(op, StageBlocks)]
        counts.append((len(staged), sum(isinstance(op, ScatterBlocks) for op in ops)))
        for op in ops:
            is_right = [True] * len(op.block_ids) if isinstance(op, ScatterBlocks) else []
            copies.over.append(FinishedCopy(op.number, is_right, 0.001))  # type: ignore[union-attr]
    assert counts == [(1, 0), (1, 1), (1, 1), (1, 1), (0, 1), (0, 0), (0, 0)]
    tier.check_integrity()
