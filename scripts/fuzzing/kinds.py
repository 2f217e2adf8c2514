"""Kinds of files: how a damaged one is made of a seed, and what reads it as the program does."""

import json
import os
import random
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from scripts.fuzzing import seed_files as seeds
from scripts.fuzzing.mutations import EXTREMES, mutate_bytes, mutate_json, mutate_opcodes

Files = Mapping[str, bytes]
"""Contents by name, in one directory."""


@dataclass(frozen=True)
class Kind:
    """A kind of file."""

    make: Callable[[random.Random], Files]
    """Valid files of which one is damaged."""
    read: Callable[[Path], None]
    """Reads a directory with these files. Raises JaxLLMError for what it refuses."""
    valid: Callable[[], Iterator[Files]]
    """Files without damage, all of which are accepted."""


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


# --- weights ---


def _safetensors(tensors: dict[str, Any], name: str) -> tuple[Callable[[random.Random], Files], Callable[[], Iterator[Files]]]:
    header, data = seeds.safetensors_header(tensors)
    whole = seeds.safetensors_file(_json(header), data)

    def make(rng: random.Random) -> Files:
        kind = rng.random()
        if kind < 0.3:
            return {name: mutate_bytes(rng, whole, [whole])}
        if kind < 0.4:
            return {name: seeds.safetensors_file(_json(header), data, rng.choice(EXTREMES))}
        if kind < 0.6:
            return {name: seeds.safetensors_file(_json(_with_numbers(rng, header)), data)}
        return {name: seeds.safetensors_file(mutate_json(rng, header), data)}

    return make, lambda: iter([{name: whole}])


def _with_numbers(rng: random.Random, header: Mapping[str, Any]) -> dict[str, Any]:
    """The header with another shape or other offsets of a tensor."""
    name = rng.choice([name for name in header if name != "__metadata__"])
    fields = dict(header[name])
    if rng.random() < 0.5:
        length = rng.choice((0, 1, 3, 70, 300)) if rng.random() > 0.01 else 50_000
        fields["shape"] = [rng.choice((0, 1, 2, *EXTREMES))] * length + [rng.choice((0, 1, *EXTREMES))]
    else:
        fields["data_offsets"] = [rng.choice((0, 1, -1, *EXTREMES)) for _ in range(rng.choice((1, 2, 2, 2, 3)))]
    return {**header, name: fields}


def _bin(tensors: dict[str, Any], name: str) -> tuple[Callable[[random.Random], Files], Callable[[], Iterator[Files]]]:
    opcodes, storages = seeds.pickle_opcodes(tensors), seeds.storages(tensors)
    pickled = b"".join(opcodes)
    whole = seeds.archive([("model/data.pkl", pickled), *storages.items()])

    def make(rng: random.Random) -> Files:
        kind = rng.random()
        if kind < 0.25:
            return {name: mutate_bytes(rng, whole, [whole, pickled])}
        members = list(storages.items())
        data = mutate_opcodes(rng, opcodes) if kind < 0.85 else mutate_bytes(rng, pickled, [pickled])
        if kind > 0.95:
            at = rng.randrange(len(members))
            members[at] = (members[at][0], mutate_bytes(rng, members[at][1]))
            members += rng.choice(([], [members[at]], [("other/data.pkl", pickled)], [("model/data.pkl", pickled)]))
        compression = zipfile.ZIP_DEFLATED if rng.random() < 0.05 else zipfile.ZIP_STORED
        return {name: seeds.archive([("model/data.pkl", data), *members], compression)}

    return make, lambda: iter([{name: whole}])


def _read_weights(of: str) -> Callable[[Path], None]:
    def read(directory: Path) -> None:
        from jaxllm.loaders import checkpoint, pytorch, safetensors

        module = {"safetensors": safetensors, "pytorch": pytorch}[of]
        loaded = module.Checkpoint(directory)  # type: ignore[attr-defined]
        for name, entry in loaded.entries.items():
            if entry.dtype in checkpoint.NUMPY_TYPES:
                _touch(loaded.tensor(name))

    return read


def _touch(array: np.ndarray) -> None:
    """Read some values of an array: its first and its last."""
    if array.size:
        np.array(array[(0,) * array.ndim]), np.array(array[(-1,) * array.ndim])


def _make_index(rng: random.Random) -> Files:
    header, data = seeds.safetensors_header(seeds.TENSORS)
    whole = seeds.safetensors_file(_json(header), data)
    return {"model.safetensors": whole, "model.safetensors.index.json": mutate_json(rng, seeds.INDEX)}


def _valid_index() -> Iterator[Files]:
    header, data = seeds.safetensors_header(seeds.TENSORS)
    yield {"model.safetensors": seeds.safetensors_file(_json(header), data), "model.safetensors.index.json": _json(seeds.INDEX)}


# --- adapters ---


def _adapter(damaged: Kind) -> Kind:
    """An adapter whose weights are damaged."""
    config = {"adapter_config.json": _json(seeds.ADAPTER_CONFIG)}
    return Kind(
        lambda rng: {**config, **damaged.make(rng)}, _read_adapter, lambda: ({**config, **files} for files in damaged.valid())
    )


def _make_adapter_config(rng: random.Random) -> Files:
    return {**next(_valid_adapter()), "adapter_config.json": mutate_json(rng, seeds.ADAPTER_CONFIG)}


def _valid_adapter() -> Iterator[Files]:
    header, data = seeds.safetensors_header(seeds.ADAPTER_TENSORS)
    whole = seeds.safetensors_file(_json(header), data)
    yield {"adapter_config.json": _json(seeds.ADAPTER_CONFIG), "adapter_model.safetensors": whole}


def _read_adapter(directory: Path) -> None:
    from jaxllm.lora.checkpoint import read_adapter
    from jaxllm.lora.shapes import TargetShape

    inputs, outputs = seeds.ADAPTER_SHAPES["A"][1], seeds.ADAPTER_SHAPES["B"][0]
    module = "model.layers.0.self_attn.q_proj"
    files = read_adapter(directory, {module: TargetShape(inputs, outputs)}, 8, 8)
    for side in "AB":
        files.tensor(f"{module}.lora_{side}.weight")


# --- configs ---


def _make_config(rng: random.Random) -> Files:
    from jaxllm.models.registry import FAMILIES

    config = seeds.config(rng.choice(list(FAMILIES)))
    return {"config.json": mutate_json(rng, {**config, **rng.choice(seeds.ADDITIONS)})}


def _valid_config() -> Iterator[Files]:
    from jaxllm.models.registry import FAMILIES

    yield from ({"config.json": _json(seeds.config(name))} for name in FAMILIES)


def _read_config(directory: Path) -> None:
    from jaxllm.models.load_config import load_model_config
    from jaxllm.text.generation_config import load_generation_config

    config = load_model_config(directory)
    config.described()
    load_generation_config("auto", directory)


def _make_generation_config(rng: random.Random) -> Files:
    return {**_LLAMA, "generation_config.json": mutate_json(rng, seeds.GENERATION_CONFIG)}


def _make_pooling(rng: random.Random) -> Files:
    name = rng.choice(list(seeds.POOLING))
    files = {each: _json(value) for each, value in seeds.POOLING.items()}
    return {**_LLAMA, **files, name: mutate_json(rng, seeds.POOLING[name])}


_LLAMA = {"config.json": _json(seeds.config("LlamaForCausalLM"))}


# --- tokenizers ---

TEXT = "Hello <s>wörld</s>  ab abc 12\n\t<extra>x"


def _make_tokenizer(rng: random.Random) -> Files:
    whole = rng.choice(seeds.tokenizers())
    if rng.random() < 0.3:
        text = mutate_json(rng, whole)
    else:  # one part alone, as most of a tokenizer is its vocabulary
        name = rng.choice([name for name, part in whole.items() if part is not None])
        part = mutate_json(rng, whole[name])
        if name == "model" and rng.random() < 0.7:
            rest = {key: value for key, value in whole[name].items() if key not in ("vocab", "merges")}
            inner = mutate_json(rng, rest).strip()
            part = _json({key: whole[name][key] for key in whole[name].keys() - rest.keys()})[:-1] + b"," + inner[1:]
        others = [_json(key) + b":" + _json(value) for key, value in whole.items() if key != name]
        text = b"{" + b",".join([*others, _json(name) + b":" + part]) + b"}"
    return {"tokenizer.json": text, "tokenizer_config.json": _json(seeds.TOKENIZER_CONFIG)}


def _make_tokenizer_config(rng: random.Random) -> Files:
    files = dict(next(_valid_tokenizers()))
    name, content = rng.choice(_BESIDE_TOKENIZER)
    files[name] = mutate_json(rng, content)
    if rng.random() < 0.1:
        files["chat_template.jinja"] = mutate_bytes(rng, seeds.TEMPLATE.encode())
    return files


_BESIDE_TOKENIZER: tuple[tuple[str, Any], ...] = (
    ("tokenizer_config.json", seeds.TOKENIZER_CONFIG),
    ("tokenizer_config.json", seeds.TOKENIZER_CONFIG),
    ("special_tokens_map.json", seeds.SPECIAL_TOKENS),
    ("chat_template.json", {"chat_template": seeds.TEMPLATE}),
)


def _valid_tokenizers() -> Iterator[Files]:
    for tokenizer in seeds.tokenizers():
        yield {"tokenizer.json": _json(tokenizer), "tokenizer_config.json": _json(seeds.TOKENIZER_CONFIG)}


def _read_tokenizer(directory: Path) -> None:
    from jaxllm.text.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(directory)
    ids = tokenizer.encode(TEXT)
    tokenizer.encode_as_text(TEXT, is_start=False)
    tokenizer.decode(ids)
    tokenizer.all_special_ids, tokenizer.bos_token_id, tokenizer.eos_token_id  # noqa: B018
    for id in ids[:4]:
        tokenizer.token_text(id), tokenizer.token_bytes(id)
    len(tokenizer.fallback_bytes)


# --- GGUF ---


def _make_gguf(rng: random.Random) -> Files:
    file = rng.choice(seeds.gguf_files())
    if rng.random() < 0.3:
        return {"model.gguf": mutate_bytes(rng, file.encoded(), [rng.choice(seeds.gguf_files()).encoded()])}
    for _ in range(rng.choice((1, 1, 2, 3))):
        file = _damaged(rng, file)
    return {"model.gguf": file.encoded()}


def _damaged(rng: random.Random, file: seeds.Gguf) -> seeds.Gguf:
    """The file with one field changed."""
    value, tensor = rng.randrange(len(file.values) or 1), rng.randrange(len(file.tensors) or 1)
    extreme = rng.choice((0, 1, 2, 3, -1, *EXTREMES))
    if not file.values or not file.tensors:
        return replace(file, num_values=extreme)
    return rng.choice(
        (
            lambda: replace(file, version=extreme),
            lambda: replace(file, num_tensors=extreme),
            lambda: replace(file, num_values=extreme),
            lambda: replace(file, num_data_bytes=rng.choice((0, 1, 31, 500))),
            lambda: seeds.with_value(file, value, code=rng.choice((*range(14), 255))),
            lambda: seeds.with_value(file, value, element=rng.choice((*range(14), 255))),
            lambda: seeds.with_value(file, value, count=extreme),
            lambda: seeds.with_value(file, value, length=extreme),
            lambda: seeds.with_value(file, value, name=rng.choice(file.values).name),
            lambda: seeds.with_value(file, value, content=_content(rng, file.values[value].content)),
            lambda: seeds.with_value(file, value, content=_content(rng, file.values[value].content)),
            lambda: seeds.with_value(file, value, code=9, element=9, content=[_nested_arrays(rng)]),
            lambda: replace(file, values=file.values[:value] + file.values[value + 1 :]),
            lambda: seeds.with_tensor(file, tensor, code=rng.choice((*range(42), 255, extreme))),
            lambda: seeds.with_tensor(file, tensor, offset=extreme),
            lambda: seeds.with_tensor(file, tensor, num_dimensions=extreme),
            lambda: seeds.with_tensor(file, tensor, shape=(extreme,) * rng.choice((0, 1, 2, 4, 5, 100))),
            lambda: seeds.with_tensor(
                file, tensor, name=rng.choice((b"", b"\xff", b"a" * 1000, rng.choice(file.tensors).name))
            ),
            lambda: replace(file, tensors=file.tensors[:tensor] + file.tensors[tensor + 1 :]),
        )
    )()


def _content(rng: random.Random, content: Any) -> Any:
    if isinstance(content, bytes):
        return rng.choice(
            (b"", b"\xff\xfe", content * 2, content[1:], b"a" * 20_000, b"qwen2", b"gpt2", b"{{ 9**9**9 }}", b" ")
        )
    if isinstance(content, list):
        at = rng.randrange(len(content) or 1)
        other = _content(rng, content[at]) if content else 0
        times = rng.choice((1, 2, 50)) if rng.random() > 0.02 else 20_000
        return rng.choice(([], content[:at], content[:at] + [other] * times + content[at + 1 :], content * 2, content[::-1]))
    return rng.choice((0, 1, -1, 2, 1000, 2**31 - 1, 2**32 - 1, 1e30, float("nan"), float("inf"), -1e-30, *EXTREMES))


def _nested_arrays(rng: random.Random) -> bytes:
    """Arrays in arrays, as the elements of one."""
    depth = rng.choice((1, 3, 100, 2000, 50_000))
    return b"\x09\0\0\0\x01\0\0\0\0\0\0\0" * depth + b"\0\0\0\0" + b"\0" * 8


def _read_gguf(directory: Path) -> None:
    from jaxllm.errors import ModelLoadError
    from jaxllm.gguf_files.unpack import NO_TOKENIZER, unpack
    from jaxllm.loaders import gguf

    os.environ["JAXLLM_CACHE_DIR"] = str(directory / "cache")
    model = unpack(directory / "model.gguf")
    refused: ModelLoadError | None = None
    if not (model / NO_TOKENIZER).is_file():
        try:
            _read_tokenizer(model)
        except ModelLoadError as error:
            refused = error
    _read_config(model)
    loaded = gguf.Checkpoint(model)
    for name, entry in loaded.entries.items():
        if entry.dtype == "F32":
            _touch(loaded.tensor(name))
    if refused is not None:
        raise refused


def _of(
    make_and_valid: tuple[Callable[[random.Random], Files], Callable[[], Iterator[Files]]], read: Callable[[Path], None]
) -> Kind:
    make, valid = make_and_valid
    return Kind(make, read, valid)


# --- images ---

_IMAGE_SETTINGS = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "size": {"shortest_edge": 3136, "longest_edge": 65536},
    "patch_size": 14,
    "image_mean": [0.5, 0.5, 0.5],
    "resample": 3,
}


def _make_image(rng: random.Random) -> Files:
    images = seeds.images()
    name = rng.choice(sorted(images))
    return {name: mutate_bytes(rng, images[name], list(images.values()))}


def _read_image(directory: Path) -> None:
    from jaxllm.media.image_files import load, open_image
    from jaxllm.media.options import MediaOptions
    from jaxllm.media.rgb import to_rgb

    (path,) = directory.iterdir()
    image = open_image(path.read_bytes(), "prompt", MediaOptions(mm_max_image_pixels=1 << 22))
    load(image, "prompt")
    to_rgb(image, "prompt", (255, 255, 255))


def _read_animation(directory: Path) -> None:
    from jaxllm.media.clips import open_clip
    from jaxllm.media.options import MediaOptions

    (path,) = directory.iterdir()
    clip = open_clip(path.read_bytes(), "prompt", MediaOptions(mm_max_image_pixels=1 << 22, mm_max_video_pixels=1 << 23))
    for _ in clip.read(range(len(clip.seconds))):
        pass


def _read_image_settings(directory: Path) -> None:
    from jaxllm.media.options import MediaOptions
    from jaxllm.media.processor import make_processor
    from jaxllm.model_parts import Vision

    vision = Vision("qwen3_vl", 5, 14, 2, 16, 1, 1, 16, 16)
    make_processor(directory, vision, MediaOptions()).count_tokens(640, 480)


KINDS: Mapping[str, Kind] = {
    "safetensors": _of(_safetensors(seeds.TENSORS, "model.safetensors"), _read_weights("safetensors")),
    "bin": _of(_bin(seeds.TENSORS, "pytorch_model.bin"), _read_weights("pytorch")),
    "index": Kind(_make_index, _read_weights("safetensors"), _valid_index),
    "adapter": _adapter(_of(_safetensors(seeds.ADAPTER_TENSORS, "adapter_model.safetensors"), _read_adapter)),
    "adapter_bin": _adapter(_of(_bin(seeds.ADAPTER_TENSORS, "adapter_model.bin"), _read_adapter)),
    "adapter_config": Kind(_make_adapter_config, _read_adapter, _valid_adapter),
    "gguf": Kind(_make_gguf, _read_gguf, lambda: ({"model.gguf": file.encoded()} for file in seeds.gguf_files())),
    "config": Kind(_make_config, _read_config, _valid_config),
    "params": Kind(
        lambda rng: {"params.json": mutate_json(rng, seeds.MISTRAL)},
        _read_config,
        lambda: iter([{"params.json": _json(seeds.MISTRAL)}]),
    ),
    "generation_config": Kind(
        _make_generation_config,
        _read_config,
        lambda: iter([{**_LLAMA, "generation_config.json": _json(seeds.GENERATION_CONFIG)}]),
    ),
    "pooling": Kind(
        _make_pooling, _read_config, lambda: iter([{**_LLAMA, **{name: _json(value) for name, value in seeds.POOLING.items()}}])
    ),
    "tokenizer": Kind(_make_tokenizer, _read_tokenizer, _valid_tokenizers),
    "tokenizer_config": Kind(_make_tokenizer_config, _read_tokenizer, _valid_tokenizers),
    "tekken": Kind(
        lambda rng: {"tekken.json": mutate_json(rng, seeds.TEKKEN)},
        _read_tokenizer,
        lambda: iter([{"tekken.json": _json(seeds.TEKKEN)}]),
    ),
    "image": Kind(_make_image, _read_image, lambda: ({name: data} for name, data in seeds.images().items())),
    "animation": Kind(_make_image, _read_animation, lambda: iter([{"image.gif": seeds.images()["image.gif"]}])),
    "preprocessor_config": Kind(
        lambda rng: {"preprocessor_config.json": mutate_json(rng, _IMAGE_SETTINGS)},
        _read_image_settings,
        lambda: iter([{"preprocessor_config.json": _json(_IMAGE_SETTINGS)}]),
    ),
}
"""By name."""
