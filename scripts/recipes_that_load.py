"""Print which architectures of vLLM's text recipes load here, and their share: python scripts/recipes_that_load.py [--missing]

tests/vllm_recipes.txt has a line for each of the 121 recipes of vllm-project/recipes (2026-08-21) that serve text: those with the task
`text`, and eight multimodal ones of families of text. A line has the model, the architecture of its config.json, and where that is one
of several models perhaps the architecture of its text model. Architectures are written down from the model cards, as configs of gated
and very new models were not at hand; whether a checkpoint's other values are supported, only `jaxllm inspect MODEL` tells.
"""

import argparse
import functools
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from jaxllm.models.registry import FAMILIES, is_known

RECIPES = Path(__file__).resolve().parent.parent / "tests" / "vllm_recipes.txt"


def recipes() -> dict[str, tuple[str, ...]]:
    """The architectures of each model: of its config, and perhaps of the text model in it."""
    return {model: tuple(names) for model, *names in map(str.split, RECIPES.read_text(encoding="utf-8").splitlines())}


@functools.cache
def loads(architectures: tuple[str, ...]) -> bool:
    """Whether a model of these architectures is of a family that is known."""
    whole, *text = architectures
    return all(name in FAMILIES for name in text) and is_known(
        {"architectures": [whole], "text_config": {"architectures": text} if text else None}
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Which of vLLM's text recipes load.")
    parser.add_argument("--missing", action="store_true", help="list only what does not load")
    only_missing = parser.parse_args().missing
    counts = Counter(recipes().values())
    for architectures, count in sorted(counts.items()):
        is_there = loads(architectures)
        if not (only_missing and is_there):
            print(f"{count:3} {'loads' if is_there else '-':5} {' / '.join(architectures)}")
    there = sum(count for architectures, count in counts.items() if loads(architectures))
    print(f"{there} of {counts.total()} recipes ({there / counts.total():.0%})")


if __name__ == "__main__":
    main()
