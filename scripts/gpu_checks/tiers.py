"""Blocks in host memory: copies during steps are right to the bit and change no token, damage is noticed, and engines that load blocks say
what others compute."""

import contextlib
import itertools
import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm import LLM, SamplingParams
from jaxllm.device_ops import CopyBlocks, FinishedCopy, GatherBlocks, LoadBlocks
from jaxllm.kv_tiers.rates import Rates
from jaxllm.measuring.runs import end_all, greedy, random_prompts
from jaxllm.request import EngineCoreRequest
from jaxllm.scheduler.loading import Loading
from scripts.gpu_checks import Outcome, block_writer, shapes
from scripts.kernels.compiling import first_line

GEMMA3: shapes.Shapes = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "vocab_size": 128256,
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "num_hidden_layers": 34,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 1024,
    "sliding_window_pattern": 6,
    "max_position_embeddings": 131072,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
DEEPSEEK: shapes.Shapes = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 4096,
    "moe_intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": 768,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 8192,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


@dataclass(frozen=True)
class Model:
    """Shapes, and options of the engine."""

    name: str
    shapes: shapes.Shapes
    num_layers: int
    options: dict[str, Any] = field(default_factory=dict)
    num_devices: int = 1


MODELS = (
    Model("full attention", shapes.LLAMA_8B, 8),
    Model("full attention, fp8 cache", shapes.LLAMA_8B, 8, {"kv_cache_dtype": "fp8"}),
    Model("windows and full attention", GEMMA3, 12),
    Model("latents", DEEPSEEK, 4),
    Model("full attention on 2 devices", shapes.LLAMA_8B, 8, {"tensor_parallel_size": 2}, 2),
    Model("latents on 2 devices", DEEPSEEK, 4, {"tensor_parallel_size": 2}, 2),
)
_TINY = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 2048}
_TINY_OF = {
    "gemma3_text": {"head_dim": 16, "sliding_window": 32, "sliding_window_pattern": 2},
    "deepseek_v3": {
        "moe_intermediate_size": 32,
        "kv_lora_rank": 32,
        "q_lora_rank": 24,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "v_head_dim": 20,
        "n_routed_experts": 8,
    },
    "llama": {"head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2},
}


@dataclass(frozen=True)
class Sizes:
    """Sizes of the load and of copies."""

    num_blocks: int
    num_requests: int
    prompt_len: int
    num_tokens: int
    num_rounds: int
    host_gib: float


FULL = Sizes(4096, 32, 200, 400, 60, 4.0)
TINY = Sizes(64, 2, 20, 40, 10, 0.01)


def check(*, tiny: bool) -> Iterator[Outcome]:
    """Kernels that write blocks, copies of each kind of cache, then engines with little room on the device."""
    yield from block_writer.check()
    for model in MODELS:
        name = f"copies, {model.name}"
        if model.num_devices > len(jax.devices()):
            yield Outcome(name, False, f"this machine has {len(jax.devices())} device", skipped=True)
            continue
        try:
            yield from _copies(name, model, tiny=tiny)
        except Exception as problem:
            yield Outcome(name, False, first_line(problem, limit=1000))
    yield from _tokens(tiny=tiny)


@contextlib.contextmanager
def engine(model: Model, sizes: Sizes, *, tiny: bool) -> Iterator[Any]:
    """The core of an engine whose tier does nothing: copies are left to the check."""
    config = model.shapes | {"num_hidden_layers": model.num_layers}
    if tiny:
        config |= _TINY | _TINY_OF[config["model_type"]]
    small = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "token_buckets": [32], "decode_buckets": [4]}
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(json.dumps(config))
        llm = LLM(
            directory,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="float32" if tiny else "bfloat16",
            num_gpu_blocks_override=sizes.num_blocks,
            kv_offloading_size=sizes.host_gib,
            max_model_len=sizes.prompt_len + sizes.num_tokens,
            use_progress_bar=False,
            **{**(small if tiny else {"max_num_seqs": 64, "decode_buckets": [8, 64]}), **model.options},
        )
        try:
            core: Any = llm.llm_engine.core
            core.scheduler.cache_manager.loading = Loading(core.scheduler.cache_manager, ())
            yield llm
        finally:
            llm.shutdown()


class Copying:
    """Copies among half of an engine's blocks, which are taken from its pool, and what each block should have."""

    def __init__(self, core: Any, seed: int = 0):
        self.core, self.rng = core, np.random.default_rng(seed)
        self.copier = core.runner.op_runner(GatherBlocks)
        pool = core.scheduler.cache_manager.pool
        self.taken = pool.allocate(pool.num_free_blocks // 2)
        self.blocks = np.array(sorted(block.block_id for block in self.taken))
        self.content = dict(zip(self.blocks.tolist(), self.blocks.tolist(), strict=True))
        """By block, that which had its content at first."""
        self.unknown: set[int] = set()
        """Blocks that have parts of several contents, or are being written."""
        num_copies, key = self.copier.format.num_copies, jax.random.key(seed)
        filled, self.at_first = [], []
        for cache, each in zip(core.runner.caches, jax.random.split(key, len(core.runner.caches)), strict=True):
            filled.append(_fill(cache, each, self.blocks, num_copies))
            self.at_first.append(filled[-1][self.blocks])
        core.runner.caches = tuple(filled)
        self._numbers = itertools.count(1)
        self.is_over: dict[int, FinishedCopy] = {}

    def add(self, op: CopyBlocks) -> int:
        """Have the next plan carry an operation. Returns its number."""
        self.core.ops.add(op)
        return op.number

    def number(self) -> int:
        return next(self._numbers)

    def take(self) -> None:
        """Note the copies that are over."""
        for copy in self.copier.finished():
            if copy.error is not None:
                raise copy.error
            self.is_over[copy.number] = copy

    def chain(self, staging: int, *, damage: bool = False) -> Iterator[int]:
        """Copy some blocks to the host and into others. Gives the number of the copy that it waits for."""
        sources = self._known(int(self.rng.integers(1, min(self.copier.max_blocks, len(self.blocks) // 16) + 1)))
        slots = self._slots(staging, len(sources))
        contents = [self.content[block] for block in sources]
        yield self.add(GatherBlocks(self.number(), sources, slots, staging))
        if damage:
            self.copier.arena.words[slots[0], 0, int(self.rng.integers(self.copier.format.part_words))] ^= 1 << 17
        targets = self._known(len(sources))
        self.unknown.update(targets)
        number = self.add(LoadBlocks(self.number(), targets, slots[: len(targets)]))
        yield number
        right = [not damage or index > 0 for index in range(len(targets))]
        assert list(self.is_over[number].is_right) == right, "a verdict is wrong"
        for block, content, is_right in zip(targets, contents, right, strict=False):
            if is_right:
                self.content[block] = content
            if is_right or self.copier.format.num_devices == 1:
                self.unknown.remove(block)  # of several devices the others write their parts

    def _known(self, count: int) -> list[int]:
        """Some blocks with whole contents, in random order."""
        return [block for block in self.rng.permutation(self.blocks).tolist() if block not in self.unknown][:count]

    def _slots(self, staging: int, count: int) -> list[int]:
        """Slots that no other buffer uses, some of them consecutive."""
        own = np.arange(staging, self.copier.num_slots, self.copier.num_staging)
        first = int(self.rng.integers(0, max(1, len(own) - count)))
        chosen = own[first : first + count]
        return [int(slot) for slot in (self.rng.permutation(chosen) if self.rng.random() < 0.5 else chosen)]

    def wrong_blocks(self) -> int:
        """Blocks that do not have what they should."""
        wanted = np.searchsorted(self.blocks, [self.content[block] for block in self.blocks.tolist()])
        wrong = np.zeros(len(self.blocks), bool)
        for cache, at_first in zip(self.core.runner.caches, self.at_first, strict=True):
            wrong |= np.asarray(_differs(cache[self.blocks], at_first[wanted]))
        return sum(
            bool(differs) for block, differs in zip(self.blocks.tolist(), wrong, strict=True) if block not in self.unknown
        )


def _fill(cache: jax.Array, key: jax.Array, blocks: np.ndarray, num_copies: int) -> jax.Array:
    """A cache with random bits in some blocks, equal in copies of heads."""
    bits = jnp.dtype(f"uint{8 * cache.dtype.itemsize}")

    def fill(cache: jax.Array, key: jax.Array) -> jax.Array:
        _, heads, *rest = cache.shape
        new = jax.random.bits(key, (len(blocks), heads // num_copies, *rest), bits)
        return cache.at[blocks].set(jax.lax.bitcast_convert_type(jnp.repeat(new, num_copies, axis=1), cache.dtype))

    return jax.jit(fill, donate_argnums=0, out_shardings=cache.sharding)(cache, key)


@jax.jit
def _differs(first: jax.Array, second: jax.Array) -> jax.Array:
    bits = jnp.dtype(f"uint{8 * first.dtype.itemsize}")
    first, second = (jax.lax.bitcast_convert_type(each, bits) for each in (first, second))
    return (first != second).any(axis=(1, 2, 3))


def _copies(name: str, model: Model, *, tiny: bool) -> Iterator[Outcome]:
    """Random copies while requests decode."""
    sizes = TINY if tiny else FULL
    with engine(model, sizes, tiny=tiny) as llm:
        core: Any = llm.llm_engine.core
        prompts = random_prompts([sizes.prompt_len] * sizes.num_requests, core.model_config.vocab_size, 1)

        def run(copying: Copying | None) -> list[list[int]]:
            for number, prompt in enumerate(prompts):
                token_ids, params = prompt["prompt_token_ids"], greedy(sizes.num_tokens)
                core.add_request(EngineCoreRequest(request_id=str(number), prompt_token_ids=token_ids, sampling_params=params))
            tokens: dict[str, list[int]] = {}
            chains: dict[int, tuple[Iterator[int], int]] = {}
            num_begun = 0
            while core.has_unfinished_requests() or chains:
                for output in core.step():
                    tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
                if copying is None:
                    continue
                if not core.has_unfinished_requests():
                    core.ops.run_now()
                copying.take()
                for staging in range(copying.copier.num_staging):
                    chain, number = chains.pop(staging, (None, 0))
                    if chain is None and num_begun < sizes.num_rounds:
                        num_begun += 1
                        chain = copying.chain(staging, damage=num_begun % 5 == 0)
                    elif chain is not None and number not in copying.is_over:
                        chains[staging] = chain, number
                        continue
                    if chain is not None and (following := next(chain, None)) is not None:
                        chains[staging] = chain, following
            assert copying is None or num_begun == sizes.num_rounds, f"{num_begun} of {sizes.num_rounds} copies began"
            return [tokens[str(number)] for number in range(len(prompts))]

        alone = run(None)
        assert core.reset_prefix_cache(), "blocks are in use"
        copying = Copying(core)
        beside = run(copying)
        wrong = copying.wrong_blocks()
        moved = sum(block != content for block, content in copying.content.items())
        equal = sum(a == b for a, b in zip(alone, beside, strict=True))
        detail = f"{wrong} of {len(copying.blocks)} blocks wrong, {moved} moved; {equal} of {len(alone)} requests equal beside copies"
        yield Outcome(
            name, not wrong and moved > 0 and equal == len(alone), f"{detail}; {sizes.num_rounds} copies, a fifth damaged"
        )
        core.scheduler.cache_manager.pool.free(copying.taken)
        end_all(llm.llm_engine)


def _tokens(*, tiny: bool) -> Iterator[Outcome]:
    """The demo model in float32 with room for some of its prompts, and with room for all. Its prompts are loaded although it would compute
    them in less time."""
    count, num_tokens, length = (6, 8, 80) if tiny else (48, 32, 400)
    rng = np.random.default_rng(0)
    prompts = [[int(token) for token in rng.integers(1, 500, int(rng.integers(length // 2, length)))] for _ in range(count)]
    params = [SamplingParams(temperature=float(i % 2), seed=i, max_tokens=num_tokens, ignore_eos=True) for i in range(count)]
    rows, tokens = (4, 32) if tiny else (32, 512)
    found: list[list[list[list[int]]]] = []
    stats: Any = None
    for options in (
        {"num_gpu_blocks_override": 2000},
        {"num_gpu_blocks_override": 16 if tiny else 250, "kv_offloading_size": 0.5},
    ):
        llm = LLM(
            "demo",
            dtype="float32",
            max_num_seqs=rows,
            max_num_batched_tokens=tokens,
            decode_buckets=[rows],
            token_buckets=[tokens],
            max_model_len=128 if tiny else 512,
            warmup="lazy",
            use_progress_bar=False,
            **options,
        )
        found.append([])
        with mock.patch.object(Rates, "is_worth_loading", return_value=True):
            for _ in range(3):
                outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
                found[-1].append([list(output.outputs[0].token_ids) for output in outputs])
        llm.llm_engine.check_integrity()
        stats = llm.llm_engine.core.stats()
        llm.shutdown()
    for number, (wanted, others) in enumerate(zip(*found, strict=True), 1):
        equal = sum(a == b for a, b in zip(wanted, others, strict=True))
        yield Outcome(f"tokens with host memory, round {number}", equal == count, f"{equal} of {count} requests equal")
    detail = f"{stats.num_stored_blocks} blocks stored, {stats.num_loaded_blocks} loaded, {stats.num_skipped_stores} skipped"
    is_used = stats.num_loaded_blocks > 0 and not stats.num_damaged_blocks
    yield Outcome("blocks come back", is_used, f"{detail}, {stats.num_damaged_blocks} damaged")
