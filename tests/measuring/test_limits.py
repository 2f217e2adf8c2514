"""The limits of work, against counting one by one."""

import dataclasses

import pytest

from jaxllm.measuring.limits import Ceilings, ModelCost, Work
from jaxllm.model_config import ModelConfig
from jaxllm.model_parts import MLP, Attention, LatentAttention, Layer, MoE, Norm, Rope, Routing
from jaxllm.quantization.formats.rounded import Rounded
from jaxllm.weight_format import Options


def config(windows=(None, None, None), **changes) -> ModelConfig:
    parts = [Layer(Attention(4, 2, 2, Rope(), window), MLP(16), Norm("attention_norm"), Norm("mlp_norm")) for window in windows]
    return ModelConfig("LlamaForCausalLM", 50, 8, tuple(parts), Norm("norm"), 100, **changes)


LAYER_CACHE = 2 * 2 * 2 * 2
"""Bytes a token: keys and values of two heads of two values in bfloat16."""


def counted(c: ModelConfig, requests, weight_bytes, num_steps, skip_prompts):
    """Token by token."""
    flops, num_bytes = 0.0, weight_bytes * num_steps
    layer = 8 * (4 + 2 * 2) * 2 + 4 * 2 * 8
    layer += 3 * 8 * 16 + 2 * 8
    for prompt, output in requests:
        for position in range(prompt + output - 1):
            if skip_prompts and position < prompt:
                continue
            flops += 2 * (c.num_layers * layer + c.hidden_size)
            if position >= prompt - 1:
                flops += 2 * c.hidden_size * c.vocab_size
            for index in range(c.num_layers):
                seen = min(position + 1, c.layers[index].attention.window or 10**9)
                flops += 4 * seen * 4 * 2
                if position >= prompt:
                    num_bytes += seen * LAYER_CACHE
    return num_bytes, flops


@pytest.mark.parametrize("skip_prompts", [False, True])
@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}, {"windows": (4, None, 4)}])
def test_work_is_what_counting_gives(changes: dict, skip_prompts: bool) -> None:
    c, requests = config(**changes), [(5, 1), (3, 7), (9, 2)]
    work = ModelCost(c, weight_bytes=1000).work(requests, num_steps=7, skip_prompts=skip_prompts)
    assert (work.bytes, work.flops) == pytest.approx(counted(c, requests, 1000, 7, skip_prompts))


def test_a_long_prompt_costs_its_pairs_and_a_long_decode_its_keys() -> None:
    """Of 16 values each: in 128 k tokens attention is nearly all of the work, and the next token reads all of them."""
    c, n = config(), 1 << 17
    cost = ModelCost(c, weight_bytes=1000)
    prompt, half = (cost.work([(length, 1)], num_steps=1).flops for length in (n, n // 2))
    assert prompt / half == pytest.approx(4, rel=0.01)
    assert cost.work([(n, 2)], num_steps=1, skip_prompts=True).bytes == 1000 + (n + 1) * cost.cache_bytes_per_token


def test_a_decode_reads_what_each_layer_keeps() -> None:
    """The token after a context of 1000 sees 1001 in full layers, 512 in windows, and latents once for all heads."""

    def decode_bytes(c: ModelConfig, num_devices: int = 1) -> float:
        return ModelCost(c, 0, num_devices).work([(1000, 2)], num_steps=1, skip_prompts=True).bytes

    # As Gemma 3: five layers of six have a window; the six share the arrays of one.
    windows = [512] * 5 + [None]
    assert decode_bytes(config(windows)) == 16 * (5 * 512 + 1001)
    assert decode_bytes(config(windows, kv_cache_dtype="float8_e4m3fn")) == 8 * (5 * 512 + 1001)
    latent = LatentAttention(16, 512, 128, 64, 128, Rope(), 1.0, Norm("latent_norm"))
    deepseek = config([None] * 2)
    deepseek = dataclasses.replace(
        deepseek, layers=tuple(dataclasses.replace(layer, attention=latent) for layer in deepseek.layers)
    )
    assert decode_bytes(deepseek) == 2 * 1001 * 576 * 2
    # Each device reads all latents, which have a copy for each, and its share of the heads of others.
    assert decode_bytes(deepseek.for_tensor_parallel(2), 2) == 2 * 1001 * 576 * 2
    assert decode_bytes(config(windows).for_tensor_parallel(2), 2) == 8 * (5 * 512 + 1001)


def test_the_limit_is_the_slower_of_both_and_devices_share() -> None:
    ceilings = Ceilings(copy_bytes_per_second=100.0, gemm_flops_per_second=10.0)
    assert ceilings.seconds(Work(200, 5)) == 2.0 and ceilings.seconds(Work(200, 50)) == 5.0
    one, two = (ModelCost(config(), 1000, num_devices=n).work([(5, 3)], num_steps=3) for n in (1, 2))
    assert (two.bytes, two.flops) == (one.bytes / 2, one.flops / 2)


def test_a_step_reads_the_experts_that_its_tokens_are_expected_to_choose():
    moe = MoE(Routing(num_experts=8, top_k=2), width=16)
    sparse = config()
    sparse = dataclasses.replace(sparse, layers=tuple(dataclasses.replace(layer, mlp=moe) for layer in sparse.layers))
    weight_bytes, expert_values = 100_000, 3 * 16 * 8
    cost = ModelCost(sparse, weight_bytes)
    one = cost.work([(1, 2)], num_steps=1, skip_prompts=True)
    unread = 3 * 6 * expert_values * 2
    assert one.bytes == pytest.approx(weight_bytes - unread + 2 * 3 * LAYER_CACHE)
    int4 = Rounded.read({}, Options("int4", None, on_gpu=True, dtype="bfloat16", unquantized=(), stored_dtype="bfloat16"), [])
    packed = ModelCost(dataclasses.replace(sparse, formats=(int4,)), weight_bytes)
    four_bits = packed.work([(1, 2)], num_steps=1, skip_prompts=True)
    scales = (2 * 2 / 8 + 2 / 16) / 3  # of a value of gate and up, which have 8 inputs, and of down, which has 16
    assert four_bits.bytes == pytest.approx(weight_bytes - unread / 2 * (0.5 + scales) + 2 * 3 * LAYER_CACHE)
    many = cost.work([(1, 2)] * 1000, num_steps=1, skip_prompts=True)
    assert many.bytes == pytest.approx(weight_bytes + 1000 * 2 * 3 * LAYER_CACHE)
    dense = ModelCost(dataclasses.replace(sparse, layers=config().layers), 1).work([(1, 2)], num_steps=1, skip_prompts=True)
    router, chosen = 8 * 8, 2 * expert_values
    assert one.flops - dense.flops == pytest.approx(2 * 3 * (router + chosen - expert_values))
