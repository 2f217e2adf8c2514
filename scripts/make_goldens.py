"""Write tests/goldens: tiny random checkpoints of every family and variant, and what transformers computes with them.

    python scripts/make_goldens.py [--only NAME ...]

Needs torch and transformers. Each folder holds config.json, model.safetensors (bfloat16) and golden.json; golden.json has
prompts of mixed lengths and, for each, the prompt's log probabilities, 64 greedy tokens with theirs, and (for the first prompt)
all logits. Everything is computed in float32. A seed is taken only if no step was close to a tie, so that greedy tokens are
comparable.
"""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import LlamaConfig, MistralConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

FOLDER = Path(__file__).parent.parent / "tests" / "goldens"
NEW_TOKENS = 64
PROMPT_LENGTHS = (12, 1, 3, 17, 33, 40)
SMALLEST_MARGIN = 1e-3
FEWEST_DISTINCT = 10

SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def llama(**changes: Any) -> PreTrainedConfig:
    return LlamaConfig(**{**SIZES, **changes})


def rope(**parameters: Any) -> PreTrainedConfig:
    """Prompts fit into the 64 tokens of the pretraining, the generated text goes beyond."""
    longest = 256 if "original_max_position_embeddings" in parameters else 64
    return llama(max_position_embeddings=longest, rope_parameters={"rope_theta": 10000.0, **parameters})


VARIANTS: dict[str, PreTrainedConfig] = {
    "llama_mha": llama(num_key_value_heads=8),
    "llama_gqa": llama(),
    "llama_mqa": llama(num_key_value_heads=1),
    "llama_tied": llama(tie_word_embeddings=True),
    "llama_bias": llama(attention_bias=True, mlp_bias=True),
    "llama_head_dim": llama(head_dim=16),
    "llama_rope_linear": rope(rope_type="linear", factor=4.0),
    "llama_rope_dynamic": rope(rope_type="dynamic", factor=2.0),
    "llama_rope_yarn": rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=64),
    "llama_rope_llama3": rope(
        rope_type="llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
    ),
    "mistral_window": MistralConfig(**SIZES, sliding_window=16),
    "qwen2": Qwen2Config(**{**SIZES, "vocab_size": 131}),
    "qwen2_window": Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=16, max_window_layers=1),
    "qwen3": Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True),
}


def random_model(config: PreTrainedConfig, seed: int, scale: float) -> torch.nn.Module:
    """Weights far larger than a training starts with: text that wanders, and clear differences between tokens."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("norm.weight"):
                weight.uniform_(0.5, 1.5)
            elif name.endswith(".bias"):
                weight.normal_(0, 0.2)
            else:
                weight.normal_(0, scale)
            weight.copy_(weight.to(torch.bfloat16))  # what the file will hold
    return model.eval()


@torch.no_grad()
def compute(model: torch.nn.Module, prompt: list[int]) -> tuple[dict[str, Any], float, torch.Tensor]:
    """What the model makes of a prompt, the smallest difference between the two likeliest tokens, and the prompt's logits."""
    ids = torch.tensor([prompt])
    logits = model(ids).logits[0]
    logprobs = torch.log_softmax(logits, -1)
    generated = model.generate(
        ids, do_sample=False, max_new_tokens=NEW_TOKENS, return_dict_in_generate=True, output_logits=True
    )
    tokens = generated.sequences[0, len(prompt) :]
    steps = torch.stack(generated.logits)[:, 0]
    best = steps.topk(2).values
    golden = {
        "prompt": prompt,
        "prompt_logprobs": [round(float(logprobs[i, token]), 6) for i, token in enumerate(prompt[1:])],
        "tokens": tokens.tolist(),
        "logprobs": [round(float(row[token]), 6) for row, token in zip(steps.log_softmax(-1), tokens, strict=True)],
    }
    return golden, float((best[:, 0] - best[:, 1]).min()), logits


def write(name: str, config: PreTrainedConfig) -> None:
    """Try seeds until the text is worth comparing."""
    for attempt in range(400):
        seed, scale = attempt, 0.3 + 0.1 * (attempt % 8)
        model = random_model(config, seed, scale)
        generator = torch.Generator().manual_seed(seed)
        prompts = [torch.randint(config.vocab_size, (n,), generator=generator).tolist() for n in PROMPT_LENGTHS]
        goldens, logits = [], None
        for prompt in prompts:
            golden, margin, prompt_logits = compute(model, prompt)
            if margin < SMALLEST_MARGIN or len(set(golden["tokens"])) < FEWEST_DISTINCT:
                break
            logits = prompt_logits if logits is None else logits
            goldens.append(golden)
        else:
            break
    else:
        raise SystemExit(f"{name}: no seed gave text without ties and loops")
    folder = FOLDER / name
    shutil.rmtree(folder, ignore_errors=True)
    model.to(torch.bfloat16).save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    result = {
        "versions": {"transformers": transformers.__version__, "torch": torch.__version__},
        "first_prompt_logits": [[round(float(value), 5) for value in row] for row in logits],
        "results": goldens,
    }
    (folder / "golden.json").write_text(json.dumps(result, separators=(",", ":")) + "\n", encoding="utf-8")
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(f"{name}: seed {seed}, scale {scale:.1f}, {size / 1024:.0f} KB", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write tests/goldens.")
    parser.add_argument("--only", nargs="*", choices=sorted(VARIANTS), default=sorted(VARIANTS))
    for name in parser.parse_args().only:
        write(name, VARIANTS[name])


if __name__ == "__main__":
    main()
