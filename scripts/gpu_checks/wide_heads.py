"""A tiny Gemma 4 with heads of 256 and of 512 in float32: an engine with kernels gives the tokens of one in plain JAX."""

import json
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from jaxllm import LLM, SamplingParams
from scripts.gpu_checks import Outcome

KINDS = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"]
CONFIG: dict[str, Any] = {
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "attention_k_eq_v": True,
    "head_dim": 256,
    "global_head_dim": 512,
    "hidden_size": 128,
    "hidden_size_per_layer_input": 16,
    "intermediate_size": 256,
    "layer_types": KINDS,
    "max_position_embeddings": 4096,
    "num_attention_heads": 8,
    "num_global_key_value_heads": 1,
    "num_hidden_layers": len(KINDS),
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "sliding_window": 64,
    "tie_word_embeddings": True,
    "vocab_size": 512,
    "vocab_size_per_layer_input": 512,
}
"""Widths as in published models, with fewer layers and values of a token."""


def check(*, tiny: bool) -> Iterator[Outcome]:
    """Greedy, of requests of differing lengths."""
    count, num_tokens, longest = (2, 3, 12) if tiny else (16, 48, 400)
    rng = random.Random(0)
    prompts = [{"prompt_token_ids": rng.choices(range(3, 500), k=rng.randint(1, longest))} for _ in range(count)]
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
    found: dict[str, list[list[int]]] = {}
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(json.dumps(CONFIG))
        for implementation in ("triton", "xla"):
            llm = LLM(
                directory,
                load_format="dummy",
                skip_tokenizer_init=True,
                dtype="float32",
                attention_implementation=implementation,
                kernel_check="off",  # the cases of part `kernels` judge sums of 512 products in float32 more leniently
                max_num_seqs=4 if tiny else 16,
                max_num_batched_tokens=16 if tiny else 256,
                max_model_len=32 if tiny else 512,
                num_gpu_blocks_override=64 if tiny else 2048,
                warmup="lazy",
                use_progress_bar=False,
            )
            outputs = llm.generate(prompts, params, use_tqdm=False)  # type: ignore[arg-type]
            found[implementation] = [list(output.outputs[0].token_ids) for output in outputs]
            llm.shutdown()
    equal = sum(a == b for a, b in zip(found["triton"], found["xla"], strict=True))
    yield Outcome(
        "heads of 256 and 512, greedy tokens",
        equal == count,
        f"{equal} of {count} requests ({count * num_tokens} tokens) equal with kernels and in plain JAX on {jax.default_backend()}",
    )
