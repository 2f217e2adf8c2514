"""Untrusted files: adapters that are loaded while others are served, and models that a command looks at."""

import json
import os
import pickle
import struct
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from scripts.attacking import wire
from scripts.attacking.attack import Seen, attack
from scripts.attacking.bystander import Bystander
from scripts.attacking.probes import Probes
from scripts.attacking.target import Attacked, PeakMemory, Target, directory
from scripts.attacking.unread import Stream

ADAPTERS = ("--allow-runtime-lora-updating",)
MIB = 1 << 20
_NESTED, _DIMENSIONS = 2_000_000, {"1 MB": 50_000, "80 MB": 4_000_000}
_LOAD_SECONDS = 60.0
"""After which the attacker of a server that does not answer leaves."""


def write_adapter(folder: Path, weights: str, data: bytes = b"") -> Path:
    """An adapter of PEFT whose file of weights, "safetensors" or "bin", holds these bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 8, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    (folder / f"adapter_model.{weights}").write_bytes(data)
    return folder


def write_pickle(folder: Path, parts: Iterable[tuple[bytes, int]]) -> Path:
    """An adapter whose `adapter_model.bin` is a deflated pickle of these opcodes, each so many times."""
    path = write_adapter(folder, "bin") / "adapter_model.bin"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive, archive.open("x/data.pkl", "w") as file:
        for piece, count in parts:
            at_once = max(1, min(count, MIB // max(1, len(piece))))
            for start in range(0, count, at_once):
                file.write(piece * min(at_once, count - start))
    return folder


def safetensors(header: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header


def load(server: Attacked, folder: Path, seconds: float = _LOAD_SECONDS) -> wire.Answer:
    """Have the server load an adapter."""
    return wire.post(server, "/v1/load_lora_adapter", {"lora_name": folder.name, "lora_path": str(folder)}, seconds=seconds)


@attack("high", "an adapter whose pickle nests tuples two million deep as a key")
def nested_adapter(target: Target, seen: Seen) -> None:
    server = target.server(*ADAPTERS)
    engine = server.pids("engine.process")
    with directory() as folder:
        nested = [(pickle.PROTO + b"\2" + pickle.EMPTY_DICT + pickle.EMPTY_TUPLE, 1), (pickle.TUPLE1, _NESTED)]
        write_pickle(folder / "deep", [*nested, (pickle.NONE + pickle.SETITEM + pickle.STOP, 1)])
        with Stream(server, num_tokens=1000) as stream, Bystander(server) as other:
            answer = load(server, folder / "deep")
            stream.read_all(60)
    seen.status("the load", answer.status, 400, 499)
    seen.equal("another's stream is whole", stream.is_whole, True)
    seen.equal("the same engine serves", bool(engine) and server.pids("engine.process") == engine, True)
    other.judge(seen)


def _shape_bomb(target: Target, seen: Seen, size: str) -> None:
    server = target.server(*ADAPTERS)
    with directory() as folder:
        shape = b"[" + b",".join([b"9223372036854775807"] * _DIMENSIONS[size]) + b"]"
        header = b'{"x":{"dtype":"F32","shape":' + shape + b',"data_offsets":[0,0]}}'
        write_adapter(folder / "wide", "safetensors", safetensors(header))
        with Bystander(server) as other, Probes(server) as probes:
            answer = load(server, folder / "wide")
        seen.status("the load", answer.status, 400, 499)
        other.judge(seen)
        seen.equal("/ready says 200 while others wait 10 s", other.worst > 10 and not probes.is_not_ready, False)


@attack("high", "a safetensors header with a shape of 50,000 dimensions (1 MB)")
def shape_bomb(target: Target, seen: Seen) -> None:
    _shape_bomb(target, seen, "1 MB")


@attack("high", "a safetensors header with a shape of four million dimensions (80 MB)")
def large_shape_bomb(target: Target, seen: Seen) -> None:
    _shape_bomb(target, seen, "80 MB")


@attack("medium", "a memo index of 50 million in an adapter's pickle")
def memo_bomb(target: Target, seen: Seen) -> None:
    parts = [pickle.PROTO + b"\2", pickle.EMPTY_DICT, pickle.LONG_BINPUT + struct.pack("<I", 50_000_000), pickle.STOP]
    _memory_bomb(target, seen, [(part, 1) for part in parts])


@attack("medium", "strings of 1.5 GB, deflated, in an adapter's pickle")
def string_bomb(target: Target, seen: Seen) -> None:
    text = pickle.BINUNICODE + struct.pack("<I", 256 * MIB)
    texts = [part for _ in range(6) for part in ((text, 1), (b"a", 256 * MIB))]
    _memory_bomb(target, seen, [(pickle.PROTO + b"\2" + pickle.EMPTY_LIST + pickle.MARK, 1), *texts, (b"e.", 1)])


def _memory_bomb(target: Target, seen: Seen, parts: list[tuple[bytes, int]]) -> None:
    server = target.server(*ADAPTERS)
    [engine] = server.pids("engine.process")
    with directory() as folder:
        write_pickle(folder / "large", parts)
        with Bystander(server) as other, PeakMemory(engine) as memory:
            answer = load(server, folder / "large")
    seen.status("the load", answer.status, 400, 499)
    seen.mebibytes("the engine and its children grow by", memory.grown_bytes, 256 * MIB)
    other.judge(seen)


def _odd_adapters(folder: Path) -> Iterator[Path]:
    """Adapters of which a file is no file, endless, sparse, or has a pattern that takes for ever to match."""
    for number, weights in enumerate(("safetensors", "bin")):
        path = write_adapter(folder / f"pipe-{weights}", weights) / f"adapter_model.{weights}"
        path.unlink()
        os.mkfifo(path)
        yield path.parent
        path = write_adapter(folder / f"zeros-{weights}", weights) / f"adapter_model.{weights}"
        path.unlink()
        path.symlink_to("/dev/zero")
        yield path.parent
        path = (
            write_adapter(folder / f"sparse-{weights}", weights, safetensors(b"{}") if number == 0 else b"")
            / f"adapter_model.{weights}"
        )
        os.truncate(path, 1 << 40)
        yield path.parent
    for name in ("pipe", "zeros", "sparse"):
        path = write_adapter(folder / f"{name}-config", "bin") / "adapter_config.json"
        path.unlink()
        os.mkfifo(path) if name == "pipe" else path.symlink_to("/dev/zero") if name == "zeros" else path.write_bytes(b"")
        if name == "sparse":
            os.truncate(path, 1 << 34)
        yield path.parent
    for name, pattern in (
        ("nested", "(.*)*" * 20 + "(([a-z.]+)+)+!"),
        ("counted", "((a{1,999}){1,999}){1,999}"),
        ("long", "a" * 10_000_000),
    ):
        path = write_adapter(folder / name, "safetensors", safetensors(b"{}")) / "adapter_config.json"
        config = json.loads(path.read_text())
        path.write_text(json.dumps({**config, "target_modules": pattern, "rank_pattern": {pattern: 4}}))
        yield path.parent


@attack("high", "adapters of pipes, endless and sparse files, and patterns that take for ever")
def odd_adapters(target: Target, seen: Seen) -> None:
    server = target.server(*ADAPTERS)
    [engine] = server.pids("engine.process")
    with directory() as folder, Bystander(server) as other, PeakMemory(engine) as memory:
        answers = {path.name: load(server, path, 15) for path in _odd_adapters(folder)}
    wrong = [f"{name}: {answer.status or 'no answer'}" for name, answer in answers.items() if not 400 <= answer.status < 500]
    seen.none_of("not refused with 4xx", wrong, len(answers))
    seen.none_of("slower than 10 s", [name for name, answer in answers.items() if answer.seconds > 10], len(answers))
    seen.mebibytes("the engine and its children grow by", memory.grown_bytes, 256 * MIB)
    other.judge(seen)


# Files that commands read


def write_model(folder: Path, config: bytes) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_bytes(config)
    return folder


def llama_config(**changes: Any) -> bytes:
    """config.json of a small model."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 512}
    return json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama", **sizes, **changes}).encode()


def gguf(texts: list[bytes], scores: list[float]) -> bytes:
    """A GGUF file without tensors: a small Llama, and a vocabulary of pieces."""

    def text(value: bytes) -> bytes:
        return struct.pack("<Q", len(value)) + value

    numbers = {"embedding_length": 64, "block_count": 2, "feed_forward_length": 128, "attention.head_count": 4}
    fields = [text(b"general.architecture") + struct.pack("<I", 8) + text(b"llama")]
    fields += [
        text(f"llama.{name}".encode()) + struct.pack("<II", 4, value)
        for name, value in {**numbers, "context_length": 512}.items()
    ]
    fields.append(text(b"llama.attention.layer_norm_rms_epsilon") + struct.pack("<If", 6, 1e-5))
    fields.append(text(b"tokenizer.ggml.model") + struct.pack("<I", 8) + text(b"llama"))
    fields.append(
        text(b"tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, len(texts)) + b"".join(text(each) for each in texts)
    )
    fields.append(
        text(b"tokenizer.ggml.scores") + struct.pack("<IIQ", 9, 6, len(scores)) + struct.pack(f"<{len(scores)}f", *scores)
    )
    types = [6 if 3 <= number < 259 else 3 if number < 3 else 1 for number in range(len(texts))]
    fields.append(
        text(b"tokenizer.ggml.token_type") + struct.pack("<IIQ", 9, 5, len(types)) + struct.pack(f"<{len(types)}i", *types)
    )
    return b"GGUF" + struct.pack("<IQQ", 3, 0, len(fields)) + b"".join(fields)


def _judge_commands(target: Target, seen: Seen, model: Path, limit_seconds: float = 12.0) -> None:
    for words in (("inspect", str(model)), ("serve", str(model), "--dry-run")):
        ended = target.command(*words, timeout_seconds=2.5 * limit_seconds, memory_bytes=8 << 30, is_first=True)
        seen.seconds(words[0], ended.seconds, limit_seconds)
        seen.equal("ends with an error of a line", ended.code in (1, 2) and "Traceback" not in ended.output, True)
        told = ended.last_line
        seen.that("last line", json.dumps(told, ensure_ascii=False), "an error", "error" in told.lower())


@attack("low", "num_hidden_layers of 100 million")
def many_layers(target: Target, seen: Seen) -> None:
    with directory() as folder:
        _judge_commands(target, seen, write_model(folder / "model", llama_config(num_hidden_layers=100_000_000)))


@attack("low", "a config.json ten million deep")
def deep_config(target: Target, seen: Seen) -> None:
    with directory() as folder:
        _judge_commands(target, seen, write_model(folder / "model", b'{"a":' + b"[" * 10_000_000 + b"]" * 10_000_000 + b"}"))


@attack("low", "a config.json four million deep, of 8 MB")
def less_deep_config(target: Target, seen: Seen) -> None:
    with directory() as folder:
        _judge_commands(target, seen, write_model(folder / "model", b'{"a":' + b"[" * 4_000_000 + b"]" * 4_000_000 + b"}"))


@attack("low", "a GGUF file with a token of 300 KB")
def long_token(target: Target, seen: Seen) -> None:
    texts = [b"<unk>", b"<s>", b"</s>", *(f"<0x{number:02X}>".encode() for number in range(256)), b"a", b"b" * 300_000]
    with directory() as folder:
        (folder / "model.gguf").write_bytes(gguf(texts, [0.0] * len(texts)))
        _judge_commands(target, seen, folder / "model.gguf")


@attack("low", "random bytes in place of each file of an adapter")
def random_adapters(target: Target, seen: Seen) -> None:
    server = target.server(*ADAPTERS)
    noise = bytes((zlib.crc32(number.to_bytes(4, "little")) & 255) for number in range(4096))
    headers = [b"", noise, b"{}", b'{"x":1}', b'{"x":{"dtype":"F32","shape":[2],"data_offsets":[0,99]}}', b"[" * 100_000]
    kinds = [("safetensors", safetensors(header)) for header in headers]
    kinds += [("safetensors", noise), ("safetensors", b"\xff" * 8), ("bin", noise), ("bin", b"PK\3\4" + noise), ("bin", b"")]
    wrong = []
    with directory() as folder, Bystander(server) as other:
        for number, (kind, data) in enumerate(kinds):
            answer = load(server, write_adapter(folder / str(number), kind, data))
            if not 400 <= answer.status < 500:
                wrong.append(f"{number}: {answer.status}")
    seen.none_of("loaded or failed", wrong, len(kinds))
    other.judge(seen)
