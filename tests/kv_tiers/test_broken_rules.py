"""The random loads of `test_random_tiers` find each rule of copies that is broken: a line of the source is changed, and a load fails."""

import inspect
import os
import random
from collections import defaultdict
from typing import Any, NamedTuple

import pytest

from jaxllm.kv_tiers.contents import Contents
from jaxllm.kv_tiers.copies import Load, Part
from jaxllm.kv_tiers.host_tier import HostTier
from jaxllm.kv_tiers.loads import Loads
from jaxllm.kv_tiers.stores import Stores
from jaxllm.scheduler.storing import Storing
from tests.kv_tiers.test_random_tiers import NUM_STEPS, many

NUM_RUNS = int(os.environ.get("BROKEN_RULES", "1"))
"""Runs for each rule, of which nine tenths must find that it is broken. With `pytest -s`, says how many did, and after how many steps."""


class Edit(NamedTuple):
    """Replaces a piece of a method, which has it once."""

    owner: type
    method: str
    old: str
    new: str


END_PART = "self._end_part(part, copy.is_right)"
RELEASE_READ = "self._contents.release_all(part.contents)"
RULES: dict[str, list[Edit]] = {
    "evicted contents are read before the step that writes their blocks": [
        Edit(
            Storing,
            "end_step",
            "ids, names = list(self._leaving.values()), list(self._leaving)",
            "(ids, names), self.late = getattr(self, 'late', ([], [])), ([*self._leaving.values()], [*self._leaving])",
        )
    ],
    "computed contents are read after the step that computes them": [
        Edit(
            Storing,
            "note_computed",
            "self._computed.update((block.block_hash, None)",
            "self._leaving.update((block.block_hash, block.block_id)",
        )
    ],
    "a store keeps its buffer until its copy is over": [
        Edit(HostTier, "_store", "ops.append(", "self._free_staging.append(staging); ops.append("),
        Edit(HostTier, "_take_in", "self._free_staging.append(store.staging)", "pass"),
    ],
    "a content is ready once its step is done": [
        Edit(HostTier, "begin_step", "self._stored and self._stored[0].step_id <= done_step_id", "self._stored")
    ],
    "a content is ready once its copy is over": [
        Edit(HostTier, "_store", "ops.append(", "[setattr(each, 'is_ready', True) for each in contents]; ops.append(")
    ],
    "contents that were computed wrongly are dropped": [Edit(HostTier, "discard", "for name in names", "for name in ()")],
    "a slot that is read is held": [
        Edit(Loads, "begin", "self._contents.use(found.values())", "self._contents.protect(found.values())"),
        Edit(Loads, "take_in", RELEASE_READ, "pass"),
        Edit(Loads, "cancel", RELEASE_READ, "pass"),
        Edit(Loads, "cancel", "self._contents.release_all(self.copying.pop(number).contents)", "self.copying.pop(number)"),
        Edit(Loads, "ops", "self._contents.release_all(part.drop_missing())", "part.drop_missing()"),
    ],
    "a slot that is written is held": [
        Edit(Contents, "add", "num_uses=1", "num_uses=0"),
        Edit(HostTier, "_make_ready", "self.contents.release_all(contents)", "pass"),
        Edit(Stores, "_end_read", "self._contents.release(content)", "pass"),
    ],
    "a slot that a store writes from is held": [
        Edit(Stores, "write_ahead", "self._contents.hold(content)", "pass"),
        Edit(Stores, "take_in", "self._contents.release(content)", "pass"),
    ],
    "blocks are written once their contents have arrived": [
        Edit(Load, "take_parts", "if not any(content.is_being_read for content in part.contents)", ""),
        Edit(Part, "drop_missing", "if not content.is_ready", "if False"),
    ],
    "blocks that were given up are not written": [Edit(Loads, "cancel", "self._copies.cancel(number)", "pass")],
    "contents that are not what was stored are not used": [Edit(Loads, "_end_part", "if not right]", "if False]")],
    "contents are found once the devices say that they are right": [
        Edit(Loads, "ops", "ops.append(", "self._end_part(part, [True] * len(part.contents)); ops.append("),
        Edit(Loads, "take_in", END_PART, "pass"),
    ],
    "contents of lost steps are dropped": [
        Edit(
            Contents,
            "end_uses",
            "if not content.is_ready and content not in but:\n                self.remove(content)",
            "content.is_ready = True",
        )
    ],
    "loads of lost steps are dropped": [Edit(HostTier, "forget", "self._loads.clear()", "pass")],
    "all buffers are free once steps are lost": [
        Edit(HostTier, "forget", "self._free_staging[:] = range(self._copies.num_staging)", "pass")
    ],
    "slots in use are not given away": [Edit(Contents, "_unused", "if not content.num_uses", "if True")],
    "plans wait for no copy": [
        Edit(
            HostTier,
            "begin_step",
            "if self._has_stores:",
            "if self._gathering:\n            self._copies.wait(1)\n        if self._has_stores:",
        )
    ],
}
"""By what should hold, in the order of a copy: to slots, from slots, after failures, without room."""


def break_rule(edits: list[Edit], monkeypatch: pytest.MonkeyPatch) -> None:
    by_method = defaultdict[tuple[type, str], list[Edit]](list)
    for edit in edits:
        by_method[edit.owner, edit.method].append(edit)
    for (owner, method), changes in by_method.items():
        source = inspect.getsource(getattr(owner, method))
        for edit in changes:
            assert source.count(edit.old) == 1, f"{owner.__name__}.{method} has changed; break the rule another way"
            source = source.replace(edit.old, edit.new)
        names: dict[str, Any] = {}
        exec("class Broken:\n" + source, vars(inspect.getmodule(owner)), names)
        monkeypatch.setattr(owner, method, getattr(names["Broken"], method))


def steps_until_found(seed: int) -> int | None:
    """The number of steps in loads that ran to their end before one failed; None: none did."""
    num_steps = 0
    try:
        for found in many(random.Random(seed), 4 * NUM_STEPS):
            num_steps += found[0]
    except (AssertionError, LookupError):
        return num_steps
    return None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("rule", RULES)
def test_a_broken_rule_is_found(rule: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("ERROR")
    break_rule(RULES[rule], monkeypatch)
    found = [steps for seed in range(NUM_RUNS) if (steps := steps_until_found(1000 + seed)) is not None]
    print(f"\n{rule}: {len(found)} of {NUM_RUNS} runs, after {sum(found) // max(1, len(found))} steps")
    assert len(found) >= 0.9 * NUM_RUNS
