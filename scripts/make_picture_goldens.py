"""Write tests/goldens/*/pictures.json: what transformers computes of prompts with pictures, with tiny random checkpoints.

    python scripts/make_picture_goldens.py [--only NAME ...] [--output DIR]

Needs torch and transformers. The checkpoints are not kept: `tests/helpers/vision_checkpoint.py` writes the same weights anywhere. Each
file has what the encoder makes of two pictures, of different sizes if the family has several, and for prompts with both, one or none of
them the prompt's log probabilities and 64 greedy tokens with theirs, computed in float32. Seeds are taken as `make_goldens.py` takes
them.
"""

import argparse
import copy
import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from jaxllm.models.load_config import load_model_config
from scripts.make_goldens import FEWEST_DISTINCT, FOLDER, LARGEST_ROUNDING, NEW_TOKENS, SMALLEST_MARGIN
from tests.helpers import pictures, vision_checkpoint

if TYPE_CHECKING:
    import torch

VARIANTS: dict[str, dict[str, Any]] = {
    "gemma3": {"family": "gemma3"},
    "idefics3": {"family": "idefics3", "tied": False},
    "internvl": {"family": "internvl"},
    "internvl_large": {"family": "internvl", "variant": "large", "tied": False},
    "mistral3": {"family": "mistral3", "tied": False},
    "qwen2_5_vl": {"family": "qwen2_5_vl", "tied": False},
    "qwen3_vl": {"family": "qwen3_vl"},
    "qwen3_vl_moe": {"family": "qwen3_vl_moe", "tied": False},
    "smolvlm": {"family": "smolvlm"},
}
"""Arguments of `vision_checkpoint.write`."""
CELLS = ((2, 3), (4, 2))
"""Height and width of the pictures, in cells: see `pictures.sizes`."""


class Reference:
    """A checkpoint as transformers computes it."""

    def __init__(self, directory: Path):
        import torch

        self.config = load_model_config(directory)
        self.model = transformers.AutoModelForImageTextToText.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
        ).eval()

    def double(self) -> "Reference":
        """The same in float64."""
        found = copy.copy(self)
        found.model = copy.deepcopy(self.model).double()
        return found

    def pixels(self, images: list[np.ndarray]) -> dict[str, "torch.Tensor"]:
        """The pictures as the model takes them."""
        import torch

        vision, dtype = self.config.vision, self.model.dtype
        assert vision is not None
        if vision.family == "pixtral":  # takes whole pictures, with padding behind their rows and columns
            sizes = [image.shape[:2] for image in images]
            most = np.max(sizes, axis=0)
            whole = np.zeros((len(images), 3, *most))
            for place, image, (height, width) in zip(whole, images, sizes, strict=True):
                place[:, :height, :width] = ((image / 255 - vision.image_mean) / vision.image_std).transpose(2, 0, 1)
            return {"pixel_values": torch.tensor(whole, dtype=dtype), "image_sizes": torch.tensor(sizes)}
        if vision.family == "gemma3":
            whole = [((image / 255 - vision.image_mean) / vision.image_std).transpose(2, 0, 1) for image in images]
            return {"pixel_values": torch.tensor(np.stack(whole), dtype=dtype)}
        if vision.has_tiles:
            tiles = np.concatenate([image.reshape(-1, image.shape[1], *image.shape[1:]) for image in images])
            found = torch.tensor(((tiles / 255 - vision.image_mean) / vision.image_std).transpose(0, 3, 1, 2), dtype=dtype)
            return {"pixel_values": found[None] if vision.family == "idefics3" else found}
        grids, arrays = zip(*(pictures.patches(image, vision) for image in images), strict=True)
        values = np.concatenate(arrays).reshape(-1, 3, 1, vision.patch_size**2) / 255
        mean, std = (np.reshape(of_color, (3, 1, 1)) for of_color in (vision.image_mean, vision.image_std))
        frames = np.repeat((values - mean) / std, vision.temporal_patch_size, axis=2).reshape(len(values), -1)
        return {"pixel_values": torch.tensor(frames, dtype=dtype), "image_grid_thw": torch.tensor(grids)}

    def features(self, images: list[np.ndarray]) -> np.ndarray:
        """What the encoder makes of pictures, [tokens, result_width]."""
        import torch

        found = self.model.model.get_image_features(**self.pixels(images))
        parts = [torch.cat(list(found.pooler_output))]
        parts += [torch.cat(list(each)) for each in getattr(found, "deepstack_features", None) or ()]
        return torch.cat(parts, dim=-1).numpy()

    def logprobs(self, token_ids: list[int], images: list[np.ndarray]) -> "torch.Tensor":
        """[T, V] of a prompt with a placeholder for each embedding, and what follows."""
        import torch

        ids = torch.tensor([token_ids])
        given = self.pixels(images) if images else {}
        if self.config.vision.family.startswith("qwen"):
            given["mm_token_type_ids"] = (ids == self.config.vision.image_token_id).int()
        if self.config.vision.attends_within:  # transformers' own masks are causal without them
            given["token_type_ids"] = (ids == self.config.vision.image_token_id).int()
        return torch.log_softmax(self.model(input_ids=ids, **given).logits[0], -1)


def prompts(generator: np.random.RandomState, placeholder: int) -> list[tuple[list[int], list[int]]]:
    """Prompts with a placeholder for each picture, and the pictures: [text, picture, text, picture, text], one alone, text alone."""

    def text(count: int) -> list[int]:
        return generator.randint(0, 256, count).tolist()

    both = [*text(5), placeholder, *text(3), placeholder, *text(4)]
    return [(both, [0, 1]), ([*text(2), placeholder, *text(1)], [1]), (text(7), [])]


def follow(reference: Reference, exact: Reference, prompt: list[int], images: list[np.ndarray]) -> dict[str, Any] | None:
    """The prompt's logprobs and the greedy tokens with theirs; None if they are not worth comparing."""
    vision = reference.config.vision
    assert vision is not None
    grids = [pictures.patches(image, vision)[0] for image in images]
    token_ids, _ = pictures.expanded(prompt, grids, vision)
    length = len(token_ids)
    for _ in range(NEW_TOKENS):
        last = reference.logprobs(token_ids, images)[-1]
        best = last.topk(2)
        token = int(best.indices[0])
        if float(best.values[0] - best.values[1]) < SMALLEST_MARGIN or token in (vision.image_token_id, vision.video_token_id):
            return None
        token_ids.append(token)
    found, precise = (
        [float(rows[i, token]) for i, token in enumerate(token_ids[1:])]
        for rows in (reference.logprobs(token_ids, images), exact.logprobs(token_ids, images))
    )
    if max(abs(a - b) for a, b in zip(found, precise, strict=True)) > LARGEST_ROUNDING:
        return None
    if len(set(token_ids[length:])) < FEWEST_DISTINCT:
        return None
    rounded = [round(value, 6) for value in found]
    return {"prompt_logprobs": rounded[: length - 1], "tokens": token_ids[length:], "logprobs": rounded[length - 1 :]}


def compute(arguments: dict[str, Any]) -> dict[str, Any] | None:
    """The golden of a checkpoint; None if it is not worth comparing."""
    with tempfile.TemporaryDirectory() as folder:
        reference = Reference(vision_checkpoint.write(Path(folder), **arguments))
    exact, vision = reference.double(), reference.config.vision
    assert vision is not None
    sizes = pictures.sizes(vision, CELLS)
    images = [pictures.picture(*size) for size in sizes]
    results = []
    for prompt, chosen in prompts(np.random.RandomState(arguments["seed"]), vision.image_token_id):
        followed = follow(reference, exact, prompt, [images[i] for i in chosen])
        if followed is None:
            return None
        results.append({"prompt": prompt, "pictures": chosen, **followed})
    features = [[round(float(value), 6) for value in row] for row in reference.features(images)]
    return {"pictures": sizes, "features": features, "results": results}


def write(name: str, output: Path) -> None:
    """Try seeds until the text is worth comparing."""
    import torch

    torch.set_grad_enabled(False)
    for attempt in range(60):
        arguments = {**VARIANTS[name], "seed": attempt, "gain": 2.0 + 0.5 * (attempt % 4)}
        if (found := compute(arguments)) is not None:
            break
    else:
        raise SystemExit(f"{name}: no seed gave text without ties, loops and large rounding")
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    path = output / name / "pictures.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"versions": versions, "checkpoint": arguments, **found}, separators=(",", ":"))
    path.write_text(text + "\n", encoding="utf-8")
    print(f"{name}: {arguments}, {path.stat().st_size / 1024:.0f} KB", flush=True)


def kept() -> list[str]:
    """The variants that have a golden in tests/goldens."""
    return sorted(path.parent.name for path in FOLDER.glob("*/pictures.json"))


def main() -> None:
    parser = argparse.ArgumentParser(description="Write tests/goldens/*/pictures.json.")
    parser.add_argument("--only", nargs="*", choices=sorted(VARIANTS), default=sorted(VARIANTS), help="default: all")
    parser.add_argument("--output", type=Path, default=FOLDER, help="folder of the goldens (default: tests/goldens)")
    arguments = parser.parse_args()
    for name in arguments.only:
        write(name, arguments.output)


if __name__ == "__main__":
    main()
