"""Ranks with drafts answer as one device does without, whatever proposes them; enough drafts are right to notice if they were not used.

Drafts accepted by ratio on several devices: tests/speculative/test_rejection.py.
"""

import numpy as np
import pytest

from jaxllm.model_parts import MoE
from jaxllm.parallel.mesh import DATA
from jaxllm.runner.drafter import NO_DRAFT
from jaxllm.speculative import control
from tests.data_parallel.test_requests import pinned, requests
from tests.helpers import draft_workout, engines, every_kind, goldens
from tests.helpers.every_kind import check
from tests.speculative.by_hand import MAX_LENGTH, target_hidden_states
from tests.speculative.checkpoints import (
    MTP_TARGET,
    NextTokenOracle,
    write_with_next_token_layer,
)

RANKS = {"data_parallel_size": 2, "enable_expert_parallel": True}


@pytest.fixture(autouse=True)
def _drafts_in_all_steps(monkeypatch):
    """However long they take on this machine: a step with the most drafts is the only kind that is timed."""
    monkeypatch.setattr(control.StepTimes, "level_to_time", lambda self: None)


@pytest.fixture(scope="module")
def expected(one_device):
    engines.renew(one_device)
    return engines.run(one_device, requests())


@pytest.fixture(scope="module")
def two_ranks(new_core, one_device):
    """A model that drafts for itself. As draft, each data-parallel rank has all its experts; as target, they share them."""
    itself = {"method": "draft_model", "model": one_device.config.model.model, "num_speculative_tokens": 1}
    core = new_core(**RANKS, speculative_config=itself)
    yield core
    core.shutdown()


@pytest.fixture
def core(two_ranks):
    return engines.renew(two_ranks)


@pytest.mark.slow
def test_requests_of_every_kind(core, expected):
    before = core.stats().num_accepted_tokens
    every_kind.check_twice(core, requests, expected, num_blocks=8, max_in_flight=3)
    assert core.stats().num_accepted_tokens > before + 50


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_has_drafts_while_the_other_has_nothing(core, expected, rank):
    before = core.stats()
    check(engines.run(core, [pinned(request, rank) for request in requests()]), expected)
    assert core.stats().num_accepted_tokens > before.num_accepted_tokens + 50
    assert core.scheduler.ranks[1 - rank].stats().num_step_tokens == 0


@pytest.mark.slow
def test_a_layer_for_multi_token_prediction_shares_its_experts_between_ranks(tmp_path):
    """Ranks of two devices. Drafts are those that NumPy proposes while the target's experts move, of which it has no copies; nor are its
    experts counted."""
    directory = write_with_next_token_layer(tmp_path)
    options = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}, "tensor_parallel_size": 2}
    options |= {"enable_eplb": True, "eplb_config": {"window_size": 3, "step_interval": 4, "num_redundant_experts": 4}}
    core = engines.make_core(MTP_TARGET.name, model=str(directory), **RANKS, **options)
    engines.reschedule(core, max_in_flight=1)
    results = goldens.golden(MTP_TARGET.name).results
    oracle, states = NextTokenOracle(directory), target_hidden_states(*goldens.load(directory), ())
    num_compared = 0

    def compare(step, answers):
        nonlocal num_compared
        runner = core.runner
        drafts = runner.ranks.split(runner.row_arrays.of_features["drafts"].draft_NK)
        for rows, drafts_NK in zip(runner.rows, drafts, strict=True):
            found = np.asarray(drafts_NK)
            for name, row in rows.by_request.items():
                tokens, drafts = results[int(name)].prompt + answers[name].tokens, found[row.index].tolist()
                has_drafts = answers[name].tokens and answers[name].finish_reason is None and drafts[0] != NO_DRAFT
                if has_drafts and len(tokens) < MAX_LENGTH - 4:
                    assert drafts == oracle.drafts(tokens, states, 2), f"request {name} after step {step}"
                    num_compared += 1

    wanted = [engines.request(str(i), result.prompt, max_tokens=20) for i, result in enumerate(results)]
    found = engines.run(core, wanted, after_step=compare)
    assert [answer.tokens for answer in found.values()] == [result.tokens[:20] for result in results]
    assert num_compared > 40
    weights, drafter, target = core.runner.weights, core.runner.shapes.functions.latest.drafter, core.model_config
    assert (drafter.config.layers[0].mlp.num_redundant, target.layers[-1].mlp.num_redundant) == (0, 4)
    assert core.expert_load()["layers"] == [i for i, layer in enumerate(target.layers) if isinstance(layer.mlp, MoE)]
    assert len(core.stats().even_expert_load) == target.num_layers
    shared = [shape for shape in weights.shapes[weights.parts[1]] if DATA in str(shape.sharding.spec)]
    assert [shape.sharding.shard_shape(shape.shape)[0] for shape in shared] == [2, 2]
    assert not np.array_equal(core._expert_load._layout.slots[-1], np.arange(12) % 8), "no expert moved"
    core.shutdown()


@pytest.mark.slow
def test_whatever_happens_to_requests(core):
    """Numbers of drafts that change from step to step, aborts, failed steps, sleep. More requests than rows, so that some outlast the
    steps that fail."""
    kinds = [{"temperature": 1.0}, {"temperature": 1.0, "num_speculative_tokens": 0, "max_tokens": 40}]
    draft_workout.interruptions(core, kinds * 6)
