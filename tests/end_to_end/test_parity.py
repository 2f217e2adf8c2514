"""Whole engines against what transformers computed: greedy tokens and prompt logprobs, however the work is cut up."""

import numpy as np
import pytest

from jaxllm import LLM, SamplingParams
from jaxllm.engine.core import EngineCore
from scripts import make_goldens, tiny_configs
from tests.helpers import engines, goldens
from tests.helpers.parity import NUM_TOKENS, check
from tests.helpers.slow import slow_except

LEFT_OUT = (
    # Tables of frequencies: tests/models and tests/layers.
    *("llama_rope_linear", "llama_rope_llama3", "llama_rope_yarn", "llama_rope_dynamic"),
    *("llama_head_dim", "deepseek_v2_lite"),  # test_other_engines
    "deepseek_v2",  # as deepseek_v2_lite is
    "llama_bias",  # test_parity_in_parallel
    "llama_mha",  # as llama_gqa is
    "llama_mqa",  # as llama_gqa is; test_tensor_parallel_gives_the_same_logits
    "llama_tied",  # as qwen3 is
    "qwen2",  # as llama_bias is
    *("qwen3_moe", "mixtral"),  # test_mixtures, expert_load
    *("gemma4", "gemma4_moe"),  # test_gemma4; groups of layers as gemma3
    "mimo_v2_flash",  # groups of layers as gemma3, sinks as gpt_oss; widths of values in tests/models
    "deepseek_v3",  # latents as deepseek_v2_lite has
    "qwen3_next",  # test_other_engines, test_linear_attention; states as nemotron_h
    *("qwen2_window", "cohere2"),  # test_windows; groups of layers as gemma3
    *("qwen3", "gpt2", "glm4"),  # pipeline/test_models; as llama_gqa
    "laguna",  # groups of layers as gemma3
    "qwen3_5",  # states as qwen3_next has; test_drafts
    *("granite_hybrid", "lfm2"),  # test_parity_in_parallel, test_drafts; states as nemotron_h and qwen3_next have
)
"""Engines keep and schedule these like others here; what differs is in the model, where tests/models compares all logits."""
VARIANTS = [name for name in goldens.NAMES if name not in LEFT_OUT]
SMALL_POOL = {
    "mistral_window": 6,
    "phi3": 6,
    "cohere2": 30,
    "exaone4": 30,
    "gemma3": 30,
    "gpt_oss": 14,
    "olmo3": 30,
}
"""Number of blocks; by default 12, of which 11 are usable, while four requests of up to 104 tokens need 7 each. Requests that hold
only a window of 16 tokens need 2 or 3; models with several groups of layers need blocks for each."""


@pytest.fixture(scope="module", params=slow_except(["llama_gqa"], VARIANTS))
def variant(request):
    """Name of a golden, and an engine over it that all checks share."""
    core = engines.make_core(request.param, num_gpu_blocks_override=300)  # enough to keep all that the prompts here compute
    yield request.param, core
    core.shutdown()


def skip_without_prefix_caching(core: EngineCore) -> None:
    if not core.config.cache.enable_prefix_caching:
        pytest.skip("no part of a prompt can be skipped")


def test_whole_prompts(variant):
    """One step at a time."""
    name, core = variant
    engines.reschedule(core, async_scheduling=False)
    check(name, core)
    assert core.stats().num_preemptions == 0
    assert core.runner.sampling._state is None, "logprobs need no state of the size of the vocabulary"


def test_cached_prompts(variant):
    name, core = variant
    skip_without_prefix_caching(core)
    engines.reschedule(core)
    check(name, core, prompt_logprobs=False)
    assert core.stats().prefix_cache_hits == 0
    answers = check(name, core, prompt_logprobs=False)
    for i, result in enumerate(goldens.golden(name).results):
        assert answers[str(i)].num_cached_tokens == len(result.prompt) // 16 * 16
    assert core.stats().prefix_cache_hits > 0


@pytest.mark.parametrize(("max_in_flight", "enable_prefix_caching"), [(2, False), (3, True)])
def test_chunks_and_preemption(variant, max_in_flight, enable_prefix_caching):
    name, core = variant
    if enable_prefix_caching:
        skip_without_prefix_caching(core)
    engines.reschedule(
        core,
        num_blocks=SMALL_POOL.get(name, 12),
        max_num_batched_tokens=16,
        max_num_prefill_tokens=16 * max_in_flight,
        max_in_flight=max_in_flight,
        enable_prefix_caching=enable_prefix_caching,
    )
    for prompt_logprobs in (True, False):  # requests with prompt logprobs do not read the prefix cache
        before = core.stats().num_preemptions
        answers = check(name, core, prompt_logprobs=prompt_logprobs)
        assert sum(answer.num_preemptions for answer in answers.values()) == core.stats().num_preemptions - before > 0
    hits = core.stats().resumed_prefix_cache_hits
    needs_more = any(getattr(part, "window", None) for part in core.model_config.attentions) or core.memory_plan.state_bytes
    if not needs_more:  # there the next request soon needs a block without which a resumed request finds nothing
        assert (hits > 0) == enable_prefix_caching
    assert enable_prefix_caching or not hits


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        (
            "mistral_window",
            {"block_size": 8, "num_gpu_blocks_override": 8, "max_num_batched_tokens": 16, "token_buckets": (16,)},
        ),
        ("llama_gqa", {"attention_implementation": "reference"}),
        ("llama_head_dim", {"tensor_parallel_size": 2, "attention_implementation": "triton"}),
        ("deepseek_v2_lite", {"tensor_parallel_size": 2}),
        (
            "qwen3_next",
            {"tensor_parallel_size": 2, "block_size": 8, "async_scheduling": False},
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(f"{k}={v}" for k, v in value.items()),
)
def test_other_engines(name, options):
    """A pool that is really small, as `num_gpu_blocks_override` makes it."""
    block_size = options.get("block_size", 16)
    core = engines.make_core(name, **{"num_gpu_blocks_override": 11 * 16 // block_size + 1, **options})
    check(name, core)
    assert core.stats().num_preemptions > 0
    core.shutdown()


IN_CHUNKS = {"tensor_parallel_size": 2, "max_num_batched_tokens": 16, "token_buckets": (16,)}
DRAFTS = {"method": "ngram", "num_speculative_tokens": 1}


@pytest.mark.torch
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama4", {**IN_CHUNKS, "num_gpu_blocks_override": 12}),  # three chunks
        ("step3p7", {**IN_CHUNKS, "num_gpu_blocks_override": 24}),
        # latents, and states by row as ling_3 has
        ("kimi_linear", {**IN_CHUNKS, "num_gpu_blocks_override": 14, "speculative_config": DRAFTS}),
    ],
)
def test_live_against_transformers(name, options, tmp_path):
    """Without a golden, of random weights, in chunks on two devices. Engines keep other families like one with a golden."""
    torch = pytest.importorskip("torch")
    reference = make_goldens.random_model(tiny_configs.VARIANTS[name], seed=1, scale=0.3)
    make_goldens.save(reference, tmp_path)
    config = reference.config.get_text_config()
    rng = np.random.default_rng(5)
    prompts = [rng.integers(config.vocab_size, size=length).tolist() for length in (2, 19, 31)]
    expected, expected_logprobs = [], []
    for prompt in prompts:
        with torch.no_grad():
            given = torch.tensor([prompt])
            length = {"max_new_tokens": NUM_TOKENS, "use_cache": config.use_cache}
            ids = reference.generate(given, attention_mask=torch.ones_like(given), do_sample=False, **length)
            logprobs = torch.log_softmax(reference(given).logits[0], -1).numpy()
        expected.append(ids[0, len(prompt) :].tolist())
        expected_logprobs.append([logprobs[i, token] for i, token in enumerate(prompt[1:])])
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, prompt_logprobs=0)
    again = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(str(tmp_path), **{**engines.SMALL, **options}) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        for num_cached in (None, 16):  # the last prompt is computed, then found
            (output,) = llm.generate(prompts[-1:], again, use_tqdm=False)
            assert output.outputs[0].token_ids == expected[-1][:8] and num_cached in (None, output.num_cached_tokens)
    for prompt, output, tokens, logprobs in zip(prompts, outputs, expected, expected_logprobs, strict=True):
        assert output.outputs[0].token_ids == tokens
        assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
        found = [at[token].logprob for at, token in zip(output.prompt_logprobs[1:], prompt[1:], strict=True)]
        np.testing.assert_allclose(found, logprobs, rtol=0, atol=1e-4)
