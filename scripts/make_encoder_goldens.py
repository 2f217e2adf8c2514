"""Write tests/goldens/*/encoder.json: tiny random encoders and classifiers, and what transformers computes with them.

    python scripts/make_encoder_goldens.py [--only NAME ...] [--output DIR]

Needs torch and transformers. Each folder holds config.json, model.safetensors (bfloat16) and encoder.json, which has prompts of mixed
lengths and for each the scores of a classifier's classes, or of an encoder the hidden states of its tokens; of encoders with token types
the prompts are pairs. Everything is computed in float32. Variants that are not kept there are compared with transformers live
(tests/models/test_transformers_live.py).
"""

import argparse
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import transformers
from transformers import BertConfig, ModernBertConfig, PreTrainedConfig, Qwen3Config, RobertaConfig, XLMRobertaConfig

if TYPE_CHECKING:
    import torch  # imported where it is needed, because VARIANTS are read without it too

FOLDER = Path(__file__).parent.parent / "tests" / "goldens"
LENGTHS = (9, 1, 40, 60)
FIRST_TOKEN = 3
"""The first id that is no special token."""

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 66,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ROBERTA = {**SIZES, "type_vocab_size": 1, "pad_token_id": 1, "bos_token_id": 0}
MODERN = {**SIZES, "num_hidden_layers": 4, "local_attention": 8, "cls_token_id": 1, "sep_token_id": 2}
BIASED = dict.fromkeys(("norm_bias", "attention_bias", "mlp_bias", "classifier_bias"), True)

VARIANTS: dict[str, tuple[PreTrainedConfig, str]] = {
    "bert_classifier": (BertConfig(**SIZES, num_labels=3), "AutoModelForSequenceClassification"),
    "roberta_classifier": (RobertaConfig(**ROBERTA, num_labels=4), "AutoModelForSequenceClassification"),
    "xlm_roberta": (XLMRobertaConfig(**ROBERTA), "AutoModel"),
    "xlm_roberta_reranker": (XLMRobertaConfig(**ROBERTA, num_labels=1), "AutoModelForSequenceClassification"),
    "modernbert": (ModernBertConfig(**MODERN), "AutoModel"),
    "modernbert_biases": (
        ModernBertConfig(**MODERN, **BIASED, classifier_pooling="mean", num_labels=1),
        "AutoModelForSequenceClassification",
    ),
    "qwen3_classifier": (
        Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=8, num_labels=3),
        "AutoModelForSequenceClassification",
    ),
}
"""The config of each, and the class of transformers that computes it."""


def kept() -> list[str]:
    """The variants that have a golden in tests/goldens."""
    return sorted(path.parent.name for path in FOLDER.glob("*/encoder.json"))


def random_model(name: str) -> "torch.nn.Module":
    """Weights far larger than a training starts with: clear differences between tokens."""
    import torch

    config, kind = VARIANTS[name]
    torch.manual_seed(0)
    model = getattr(transformers, kind).from_config(config, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        for weight_name, weight in model.named_parameters():
            if weight_name.lower().endswith("norm.weight"):
                weight.uniform_(0.5, 1.5)
            else:
                weight.normal_(0, 0.2)
            weight.copy_(weight.to(torch.bfloat16))  # what the file will hold
    return model.eval()


def prompts_of(name: str) -> list[dict[str, Any]]:
    """Prompts, and where the second text of each starts, if the model tells."""
    import torch

    config = VARIANTS[name][0]
    generator = torch.Generator().manual_seed(0)
    has_types = getattr(config, "type_vocab_size", 1) > 1
    return [
        {
            "prompt": torch.randint(FIRST_TOKEN, config.vocab_size, (length,), generator=generator).tolist(),
            "second_text_start": 2 * length // 3 if has_types and length > 1 else None,
        }
        for length in LENGTHS
    ]


def compute(model: "torch.nn.Module", prompt: list[int], second_text_start: int | None) -> Any:
    """The scores of the classes, or the hidden states of the tokens."""
    import torch

    given = {"input_ids": torch.tensor([prompt]), "attention_mask": torch.ones(1, len(prompt), dtype=torch.long)}
    if second_text_start is not None:
        given["token_type_ids"] = torch.tensor([[int(place >= second_text_start) for place in range(len(prompt))]])
    with torch.no_grad():
        found = model(**given)
    return (found.logits if hasattr(found, "logits") else found.last_hidden_state)[0]


def write(name: str, output: Path) -> None:
    import torch

    model, folder = random_model(name), output / name
    results = [{**each, "found": compute(model, **each).tolist()} for each in prompts_of(name)]
    shutil.rmtree(folder, ignore_errors=True)
    model.to(torch.bfloat16).save_pretrained(folder)
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    text = json.dumps({"versions": versions, "results": _rounded(results)}, separators=(",", ":"))
    (folder / "encoder.json").write_text(text + "\n", encoding="utf-8")
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(f"{name}: {size / 1024:.0f} KB", flush=True)


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    return round(value, 5) if isinstance(value, float) else value


def main() -> None:
    parser = argparse.ArgumentParser(description="Write tests/goldens/*/encoder.json.")
    parser.add_argument("--only", nargs="*", choices=sorted(VARIANTS), default=kept(), help="default: those of tests/goldens")
    parser.add_argument("--output", type=Path, default=FOLDER, help="folder of the checkpoints (default: tests/goldens)")
    arguments = parser.parse_args()
    for name in arguments.only:
        write(name, arguments.output)


if __name__ == "__main__":
    main()
