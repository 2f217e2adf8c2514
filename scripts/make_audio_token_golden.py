"""Write tests/goldens/qwen2_audio/audio.json: what transformers computes of prompts with clips of audio, with a tiny random checkpoint.

    python scripts/make_audio_token_golden.py [--output FILE]

Needs torch and transformers. The checkpoint is not kept: `tests/helpers/audio_checkpoint.py` writes the same weights anywhere. The file
has the embeddings of clips of several lengths, and for prompts with some of them or none the prompt's log probabilities and 64 greedy
tokens with theirs, computed in float32. A seed is taken as `make_goldens.py` takes it.
"""

import argparse
import copy
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.make_audio_golden import write_first
from scripts.make_goldens import FEWEST_DISTINCT, FOLDER, LARGEST_ROUNDING, NEW_TOKENS, SMALLEST_MARGIN
from tests.helpers import audio_checkpoint, whisper_checkpoint

CLIPS = ((0, 1.0), (1, 0.61), (2, 0.2), (3, 0.0401))
"""Seed and seconds of each; the last has one embedding."""
CHOSEN = ((0, 2, 1), (1,), (3, 0), ())
"""The clips of each prompt."""


class Reference:
    """A checkpoint as transformers computes it."""

    def __init__(self, directory: Path, clips: Sequence[tuple[int, float]] = CLIPS):
        """clips: seed and seconds of each."""
        import torch

        self.model = transformers.Qwen2AudioForConditionalGeneration.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        extract = transformers.WhisperFeatureExtractor.from_pretrained(directory)
        made = extract(
            [whisper_checkpoint.clip(*clip) for clip in clips],
            sampling_rate=16000,
            padding="max_length",
            return_attention_mask=True,
            device="cpu",
        )
        self.features, self.mask = torch.tensor(np.array(made.input_features)), torch.tensor(np.array(made.attention_mask))
        self.counts = [(((int(n) - 1) // 2 + 1) - 2) // 2 + 1 for n in self.mask.sum(-1)]

    def double(self) -> "Reference":
        """A copy that computes in float64."""
        found = copy.copy(self)
        found.model = copy.deepcopy(self.model).double()
        return found

    def logprobs(self, token_ids: list[int], clips: Sequence[int]) -> Any:
        """[T, V] of a prompt with a placeholder for each embedding, and what follows."""
        import torch

        given = {}
        if clips:
            given = {"input_features": self.features[list(clips)], "feature_attention_mask": self.mask[list(clips)]}
        return torch.log_softmax(self.model(input_ids=torch.tensor([token_ids]), **given).logits[0], -1)

    def embeddings(self, clip: int) -> np.ndarray:
        """[embeddings, width]: input of the text model in place of tokens."""
        taken: list[Any] = []
        hook = self.model.model.language_model.register_forward_pre_hook(
            lambda module, args, kwargs: taken.append(kwargs["inputs_embeds"]), with_kwargs=True
        )
        self.logprobs([audio_checkpoint.AUDIO] * self.counts[clip] + [0], (clip,))
        hook.remove()
        return taken[0][0, :-1].numpy()  # type: ignore[no-any-return]


def prompt_of(generator: np.random.RandomState, clips: tuple[int, ...]) -> list[int]:
    """Text and a placeholder for each clip, alternately."""

    def text(count: int) -> list[int]:
        return generator.randint(0, 256, count).tolist()  # type: ignore[no-any-return]

    prompt = text(5)
    for _ in clips:
        prompt += [audio_checkpoint.BOS, audio_checkpoint.AUDIO, audio_checkpoint.EOS, *text(3)]
    return prompt


def follow(reference: Reference, exact: Reference, prompt: list[int], clips: tuple[int, ...]) -> dict[str, Any] | None:
    """The prompt's logprobs and the greedy tokens with theirs; None if they are not worth comparing."""
    left = iter(clips)
    token_ids: list[int] = []
    for token in prompt:
        token_ids += [token] * (reference.counts[next(left)] if token == audio_checkpoint.AUDIO else 1)
    length = len(token_ids)
    for _ in range(NEW_TOKENS):
        best = reference.logprobs(token_ids, clips)[-1].topk(2)
        token = int(best.indices[0])
        if float(best.values[0] - best.values[1]) < SMALLEST_MARGIN or token == audio_checkpoint.AUDIO:
            return None
        token_ids.append(token)
    found, precise = (
        [float(rows[i, token]) for i, token in enumerate(token_ids[1:])]
        for rows in (reference.logprobs(token_ids, clips), exact.logprobs(token_ids, clips))
    )
    rounding = max(abs(a - b) for a, b in zip(found, precise, strict=True))
    if rounding > LARGEST_ROUNDING or len(set(token_ids[length:])) < FEWEST_DISTINCT:
        return None
    rounded = [round(value, 6) for value in found]
    found_of = {"prompt_logprobs": rounded[: length - 1], "tokens": token_ids[length:], "logprobs": rounded[length - 1 :]}
    return {"prompt": prompt, "clips": list(clips), **found_of}


def compute(arguments: dict[str, Any]) -> dict[str, Any] | None:
    """The golden of a checkpoint; None if it is not worth comparing."""
    with tempfile.TemporaryDirectory() as folder:
        reference = Reference(audio_checkpoint.write(Path(folder), **arguments))
    exact, generator, results = reference.double(), np.random.RandomState(arguments["seed"]), []
    for clips in CHOSEN:
        followed = follow(reference, exact, prompt_of(generator, clips), clips)
        if followed is None:
            return None
        results.append(followed)
    embeddings = [[[round(float(value), 6) for value in row] for row in reference.embeddings(clip)] for clip in (1, 2)]
    return {
        "clips": CLIPS,
        "counts": reference.counts,
        "embeddings": {"1": embeddings[0], "2": embeddings[1]},
        "results": results,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Write tests/goldens/qwen2_audio/audio.json.")
    parser.add_argument("--output", type=Path, default=FOLDER / "qwen2_audio" / "audio.json")
    write_first(compute, parser.parse_args().output)


if __name__ == "__main__":
    main()
