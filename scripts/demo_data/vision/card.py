"""The card of the model that sees: what it is, what it was trained on, what it can do."""

from collections.abc import Mapping

from .drawing import COLOURS, SHAPES

_CARD = """---
license: apache-2.0
library_name: transformers
pipeline_tag: image-text-to-text
---

# jaxllm demo-vision

A very small `Qwen3VLForConditionalGeneration` ({millions:.1f} million parameters, bfloat16) that comes with jaxllm and shows that
pictures work. It looks at simple drawings and is not a useful assistant: photographs mean nothing to it.

- **Pictures**: any size; they are brought to an area between 128 × 128 and 320 × 320 pixels, in multiples of 32.
- **Knows** shapes ({shapes}), colours ({colours}), counts up to six, places, sizes, texts of up to six letters or digits, sums and
  differences of numbers up to 30, bar charts, and two pictures compared. It answers in words, or with a list of objects as JSON.
- **Says so** when it is asked about a picture and there is none.

## Training

Only on drawn pictures and generated dialogues (`scripts/demo_data/vision`); nothing was downloaded. Pictures have random sizes,
backgrounds, noise, blur and compression; the loss is on answers alone. A hash of a picture's content decides whether it is held out.

    python scripts/train_demo_vision.py      # {made}

## Score

Exact answers to held-out questions, greedy, right after training:

| skill | right | of |
|---|---|---|
{rows}
"""


def card(scores: Mapping[str, tuple[int, int]], num_parameters: int, made: str) -> str:
    """The card in Markdown. `scores`: right answers, and questions, of each skill. `made`: the device and the time it took."""
    total = (sum(right for right, _ in scores.values()), sum(count for _, count in scores.values()))
    lines = [
        f"| {name} | {100 * right / max(1, count):.1f} % | {count} |"
        for name, (right, count) in (*scores.items(), ("all", total))
    ]
    return _CARD.format(
        millions=num_parameters / 1e6, shapes=", ".join(SHAPES), colours=", ".join(COLOURS), made=made, rows="\n".join(lines)
    )
