"""Write tests/goldens: tiny random checkpoints of every family and variant, and what transformers computes with them.

    python scripts/make_goldens.py [--only NAME ...] [--output DIR]

Variants that are not kept there are compared with transformers live (tests/models/test_transformers_live.py), and in whole engines by

    python scripts/make_goldens.py --output DIR --only NAME ...
    JAXLLM_GOLDENS=DIR python -m pytest tests/models tests/end_to_end/test_parity.py

Needs torch and transformers. Each folder holds config.json, model.safetensors (bfloat16) and golden.json; golden.json has
prompts of mixed lengths and, for each, the prompt's log probabilities, 64 greedy tokens with theirs, and (for the first prompt)
all logits. Everything is computed in float32. A seed is taken only if no step was close to a tie, so that greedy tokens are
comparable, and if float64 gives nearly the same: random models may amplify the rounding of float32 to more than the tests' 1e-4.
"""

import argparse
import copy
import json
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import ml_dtypes  # noqa: F401  safetensors then reads bfloat16
import transformers
from safetensors.numpy import load_file, save_file
from transformers import PreTrainedConfig

from jaxllm.models import mistral_params
from scripts.tiny_configs import VARIANTS, architecture, mistral_form, model_class_of, published

if TYPE_CHECKING:
    import torch  # imported where it is needed, because tests read FOLDER without it too

FOLDER = Path(__file__).parent.parent / "tests" / "goldens"
NEW_TOKENS = 64
PROMPT_LENGTHS = (12, 1, 3, 17, 33, 40)
SMALLEST_MARGIN = 1e-3
FEWEST_DISTINCT = 10
LARGEST_ROUNDING = 2e-5
"""Rounding of logprobs."""

OFFSET_NORMS = ("Qwen3NextRMSNorm", "Qwen3_5RMSNorm", "Qwen3_5MoeRMSNorm", "Step3p7RMSNorm", "MuseGlimmerTextCenteredRMSNorm")
"""Classes of norms whose weights are stored from zero, and would make logits too large for float32 to tell them to 1e-4."""


def kept() -> list[str]:
    """The variants that have a golden in tests/goldens."""
    return sorted(path.parent.name for path in FOLDER.glob("*/golden.json"))


def random_model(config: PreTrainedConfig, seed: int, scale: float) -> "torch.nn.Module":
    """Weights far larger than a training starts with: text that wanders, and clear differences between tokens."""
    import torch

    torch.manual_seed(seed)
    model_class = model_class_of(config)
    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}  # which float64 needs
    model = model_class._from_config(config, dtype=torch.float32, **plain)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(".sinks"):
                weight.normal_(0, 2)
            elif name.endswith(".A_log"):  # from states that forget within tokens to those that do not
                weight.uniform_(-6, -1)
            elif name.endswith("norm.weight") or (weight.ndim == 1 and not name.endswith(".bias")):
                weight.uniform_(0.5, 1.5)
                if type(model.get_submodule(name.rpartition(".")[0])).__name__ in OFFSET_NORMS:
                    weight.sub_(1)
            elif name.endswith(".bias"):
                weight.normal_(0, 0.2)
            else:
                # A tied head makes the last token the likeliest next one where its embedding is large.
                is_tied = config.get_text_config().tie_word_embeddings and "embed" in name
                weight.normal_(0, scale / 8 if is_tied else scale)
            weight.copy_(weight.to(torch.bfloat16))  # what the file will hold
        for name, buffer in model.named_buffers():  # of routers, for the choice of experts
            if name.endswith("correction_bias"):
                buffer.copy_(buffer.normal_(0, 0.2).to(torch.bfloat16))
            elif name.endswith("layer_scalar"):
                buffer.copy_(buffer.uniform_(0.5, 1.5).to(torch.bfloat16))
            elif name.endswith("bias"):
                buffer.copy_(buffer.uniform_(-0.2, 0.2).to(torch.bfloat16))
    return model.eval()


def save(model: "torch.nn.Module", directory: Path) -> None:
    """Write the model's files, with the name of its architecture on the hub."""
    model.save_pretrained(directory)
    if (make := published(model.config)) is not None:
        file = directory / "model.safetensors"
        save_file(make(load_file(file)), file)
    file = directory / "config.json"
    raw = {**json.loads(file.read_text(encoding="utf-8")), "architectures": [architecture(model.config)]}
    file.write_text(json.dumps(raw, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    if raw["architectures"] == [mistral_params.ARCHITECTURE]:
        mistral_form.rewrite(directory)


def compute(model: "torch.nn.Module", prompt: list[int]) -> tuple[dict[str, Any], float, "torch.Tensor"]:
    """Output of the model for a prompt, the smallest difference between the two likeliest tokens, and the prompt's logits."""
    import torch

    ids = torch.tensor([prompt])
    logits = model(ids).logits[0]
    logprobs = torch.log_softmax(logits, -1)
    settings = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "use_cache": model.config.get_text_config().use_cache}
    generated = model.generate(
        ids, attention_mask=torch.ones_like(ids), return_dict_in_generate=True, output_logits=True, **settings
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


def rounding(exact: "torch.nn.Module", golden: dict[str, Any]) -> float:
    """The largest difference between logprobs in float32 and those of the model in float64."""
    import torch

    tokens = golden["prompt"] + golden["tokens"]
    logprobs = torch.log_softmax(exact(torch.tensor([tokens[:-1]])).logits[0], -1)
    found = golden["prompt_logprobs"] + golden["logprobs"]
    return max(abs(float(logprobs[i, tokens[i + 1]]) - value) for i, value in enumerate(found))


def write(name: str, config: PreTrainedConfig, output: Path) -> None:
    """Try seeds until the text is worth comparing."""
    import torch

    torch.set_grad_enabled(False)
    for attempt in range(60):
        seed, scale = attempt, 0.3 + 0.1 * (attempt % 8)
        model = random_model(config, seed, scale)
        exact = copy.deepcopy(model).double()
        generator = torch.Generator().manual_seed(seed)
        prompts = [
            torch.randint(config.get_text_config().vocab_size, (n,), generator=generator).tolist() for n in PROMPT_LENGTHS
        ]
        goldens, logits = [], None
        for prompt in prompts:
            golden, margin, prompt_logits = compute(model, prompt)
            if margin < SMALLEST_MARGIN or len(set(golden["tokens"])) < FEWEST_DISTINCT:
                break
            if rounding(exact, golden) > LARGEST_ROUNDING:
                break
            logits = prompt_logits if logits is None else logits
            goldens.append(golden)
        else:
            break
    else:
        raise SystemExit(f"{name}: no seed gave text without ties, loops and large rounding")
    folder = output / name
    shutil.rmtree(folder, ignore_errors=True)
    save(model.to(torch.bfloat16), folder)
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
    parser.add_argument("--only", nargs="*", choices=sorted(VARIANTS), default=kept(), help="default: those of tests/goldens")
    parser.add_argument("--output", type=Path, default=FOLDER, help="folder of the checkpoints (default: tests/goldens)")
    arguments = parser.parse_args()
    for name in arguments.only:
        write(name, VARIANTS[name], arguments.output)


if __name__ == "__main__":
    main()
