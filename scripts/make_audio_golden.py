"""Write tests/goldens/whisper/audio.json: what transformers computes of audio, with a tiny random checkpoint of Whisper.

    python scripts/make_audio_golden.py [--output FILE]

Needs torch and transformers. The checkpoint is not kept: `tests/helpers/whisper_checkpoint.py` writes the same weights anywhere. The file
has what the encoder makes of a clip, and for each clip 64 greedy tokens with their log probabilities, computed in float32. A seed is
taken as `make_goldens.py` takes it.
"""

import argparse
import copy
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.make_goldens import FEWEST_DISTINCT, FOLDER, LARGEST_ROUNDING, NEW_TOKENS, SMALLEST_MARGIN
from tests.helpers import whisper_checkpoint

CLIPS = ((0, 1.0), (1, 0.6), (2, 0.3))
"""Seed and seconds of each."""
PROMPTS = (whisper_checkpoint.PROMPT, whisper_checkpoint.PROMPT[:-1], [263, *range(97, 115), *whisper_checkpoint.PROMPT])
"""With and without timestamps, and behind a prompt of earlier text."""


def follow(model: Any, exact: Any, features: Any, prompt: list[int]) -> dict[str, Any] | None:
    """The greedy tokens behind a prompt, and their logprobs; None if they are not worth comparing."""
    import torch

    def logprobs(model: Any, token_ids: list[int]) -> Any:
        given = features.to(model.dtype)
        return torch.log_softmax(model(input_features=given, decoder_input_ids=torch.tensor([token_ids])).logits[0], -1)

    token_ids = list(prompt)
    for _ in range(NEW_TOKENS):
        best = logprobs(model, token_ids)[-1].topk(2)
        if float(best.values[0] - best.values[1]) < SMALLEST_MARGIN:
            return None
        token_ids.append(int(best.indices[0]))
    found, precise = (
        [float(rows[i, token]) for i, token in enumerate(token_ids[1:])]
        for rows in (logprobs(model, token_ids), logprobs(exact, token_ids))
    )
    rounding = max(abs(a - b) for a, b in zip(found, precise, strict=True))
    if rounding > LARGEST_ROUNDING or len(set(token_ids[len(prompt) :])) < FEWEST_DISTINCT:
        return None
    first = len(prompt) - 1
    return {"prompt": prompt, "tokens": token_ids[len(prompt) :], "logprobs": [round(value, 6) for value in found[first:]]}


def compute(arguments: dict[str, Any]) -> dict[str, Any] | None:
    """The golden of a checkpoint; None if it is not worth comparing."""
    import torch

    with tempfile.TemporaryDirectory() as folder:
        directory = whisper_checkpoint.write(Path(folder), **arguments)
        model = transformers.WhisperForConditionalGeneration.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        extract = transformers.WhisperFeatureExtractor.from_pretrained(directory)
    exact = copy.deepcopy(model).double()
    results, encoded = [], None
    for (seed, seconds), prompt in zip(CLIPS, PROMPTS, strict=True):
        clip = whisper_checkpoint.clip(seed, seconds)
        features = torch.tensor(np.array(extract(clip, sampling_rate=16000, device="cpu").input_features))
        if encoded is None:
            encoded = model.model.encoder(features).last_hidden_state[0].numpy()
        if (followed := follow(model, exact, features, prompt)) is None:
            return None
        results.append({"clip": [seed, seconds], **followed})
    assert encoded is not None
    return {"encoded": [[round(float(value), 6) for value in row] for row in encoded], "results": results}


def main() -> None:
    parser = argparse.ArgumentParser(description="Write tests/goldens/whisper/audio.json.")
    parser.add_argument("--output", type=Path, default=FOLDER / "whisper" / "audio.json")
    write_first(compute, parser.parse_args().output)


def write_first(compute: Callable[[dict[str, Any]], dict[str, Any] | None], path: Path) -> None:
    """Write what `compute` finds for the first checkpoint, by the arguments of its random values, for which it finds something."""
    import torch

    torch.set_grad_enabled(False)
    for attempt in range(200):
        arguments = {"seed": attempt, "gain": 2.0 + 0.5 * (attempt % 4)}
        if (found := compute(arguments)) is not None:
            break
    else:
        raise SystemExit("no seed gave text without ties, loops and large rounding")
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"versions": versions, "checkpoint": arguments, **found}, separators=(",", ":"))
    path.write_text(text + "\n", encoding="utf-8")
    print(f"{arguments}, {path.stat().st_size / 1024:.0f} KB")


if __name__ == "__main__":
    main()
