"""The options of speculative decoding: reads `speculative_config`, whose names are vLLM's. Imports no JAX.

What depends on the model and the draft's weights is checked where they are read.
"""

import itertools
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from jaxllm.config import EngineConfig, nearest, type_matches, unknown_name
from jaxllm.errors import ConfigError, ModelLoadError
from jaxllm.flag_arguments import noun, without_none
from jaxllm.log import info_once
from jaxllm.options.quantization import Quantization
from jaxllm.speculative.refused import METHODS_ELSEWHERE, NO_EFFECT, REFUSED, REJECTION_METHODS_ELSEWHERE
from jaxllm.text.model_files import read_json, text_files

MAX_DRAFTS = 16
"""Most drafts of a row in a step: the kernel that verifies them takes rows of so many tokens and one."""
DEFAULT_LOOKUP = 5
DEFAULT_FORCED = 7
"""Most drafts of a row for the method grammar: most names of properties have fewer tokens, with what stands between them and values."""

Method = Literal["ngram", "draft_model", "eagle", "eagle3", "dflash", "mtp", "grammar"]
METHODS: tuple[str, ...] = typing.get_args(Method)
_METHODS_TEXT = f"the methods are {', '.join(METHODS)}"
ALIASES: Mapping[str, Method] = {
    "[ngram]": "ngram",
    "ngram_gpu": "ngram",
    "deepseek_mtp": "mtp",
    "glm4_moe_mtp": "mtp",
    "qwen3_next_mtp": "mtp",
    "qwen3_5_mtp": "mtp",
    "nemotron_h_mtp": "mtp",
    "mimo_v2_mtp": "mtp",
    "hy_v3_mtp": "mtp",
    "ernie_mtp": "mtp",
    "glm4_moe_lite_mtp": "mtp",
}
"""Other names of methods in vLLM."""
NEED_MODEL: Mapping[str, str] = {
    "draft_model": "the smaller model",
    "eagle": "the checkpoint of the EAGLE head",
    "eagle3": "the checkpoint of the EAGLE-3 head",
    "dflash": "the checkpoint of the DFlash head",
}
"""Description of `model` by the method that needs it."""
ONLY_FOR: Mapping[str, tuple[str, ...]] = {
    "prompt_lookup_min": ("ngram",),
    "prompt_lookup_max": ("ngram",),
    "model": tuple(NEED_MODEL),
    "revision": tuple(NEED_MODEL),
    "quantization": ("draft_model",),
    "draft_sample_method": (*NEED_MODEL, "mtp"),
    "rejection_sample_method": ("ngram", *NEED_MODEL, "mtp"),
}
_NO_MODEL = ("ngram", "[ngram]")
"""Models that vLLM's scripts name for n-grams."""
_IN_NAMES = {"eagle-": "eagle", "eagle3": "eagle3", "dflash": "dflash", "dspark": "dspark"}
"""Parts of a draft's name that imply its method."""
_IN_CONFIGS = ("eagle3", "eagle", "dflash", "dspark", "medusa", "mlp_speculator", "mtp")
"""Names of methods in architectures and model_type of config.json."""
_NUM_MODULES = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "n_predict")
"""How config.json calls the number of MTP modules, by family."""


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """Which drafter proposes how many tokens, and which of them are accepted. Make it with `of`, which checks it."""

    method: Method
    num_speculative_tokens: int
    """Most drafts of a row in a step."""
    model: str | None = None
    """Directory or hub id of the draft's checkpoint; None: the method has none."""
    revision: str | None = None
    quantization: Quantization | None = None
    """As the engine's option, for the draft's weights."""
    prompt_lookup_min: int = DEFAULT_LOOKUP
    """Fewest tokens that must be found again, for n-grams."""
    prompt_lookup_max: int = DEFAULT_LOOKUP
    """Most tokens that are looked for."""
    draft_sample_method: Literal["greedy", "probabilistic"] = "probabilistic"
    """Whether a drafter with a model takes its likeliest token, or draws as the request does: with the same noise, unless drafts are
    accepted by standard."""
    rejection_sample_method: Literal["exact", "standard", "synthetic"] = "exact"
    """Which drafts are accepted. exact: those equal to what the target draws; standard: by the ratio of the target's and the drafter's
    probabilities; synthetic: at given rates, whatever they are."""
    synthetic_acceptance_rates: tuple[float, ...] | None = None
    """By position, how often a draft and all before it are accepted; set if and only if acceptance is synthetic."""
    num_speculative_tokens_per_batch_size: tuple[tuple[int, int, int], ...] | None = None
    """(first size, last size, drafts of a row) for running requests, from 1 without gaps."""
    disable_by_batch_size: int | None = None
    """With more running requests than this, rows get no drafts."""

    @classmethod
    def of(
        cls,
        raw: Mapping[str, Any],
        *,
        tensor_parallel_size: int = 1,
        read_config: Callable[[str | None, str | None], Mapping[str, Any]] = lambda model, revision: {},
    ) -> "SpeculativeConfig":
        """From the JSON object. Raises ConfigError with a sentence for the first thing that is wrong.

        read_config: (model, revision) -> its config.json; None: that of the target.
        """
        given = _known(raw, tensor_parallel_size)
        method = _method(given, read_config)
        if method == "ngram" and given.get("model") in _NO_MODEL:
            del given["model"]
        for name, methods in ONLY_FOR.items():
            if name in given and method not in methods:
                raise _error(f"{name} is set, but it is for {_listed(methods)}, and the method is {method}; leave it out")
        if method in NEED_MODEL and "model" not in given:
            raise _error(f"model is missing: for the method {method} it names {NEED_MODEL[method]}")
        values = {**given, "method": method, "num_speculative_tokens": _num_drafts(given, method, read_config)}
        values |= _lookup(given)
        if method in ("ngram", "grammar"):
            values["draft_sample_method"] = "greedy"
        values["synthetic_acceptance_rates"] = _synthetic_rates(values)
        values.pop("synthetic_acceptance_length", None)
        values["num_speculative_tokens_per_batch_size"] = _schedule(values)
        return cls(**values)

    def most_drafts(self, num_running: int) -> int:
        """Most drafts of a row while so many requests run."""
        if self.disable_by_batch_size is not None and num_running > self.disable_by_batch_size:
            return 0
        ranges = self.num_speculative_tokens_per_batch_size
        if ranges is None:
            return self.num_speculative_tokens
        return next((count for _, last, count in ranges if num_running <= last), ranges[-1][2])

    @property
    def synthetic_rates_after_each(self) -> tuple[float, ...]:
        """Acceptance rate of drafts by position where all before are accepted. Empty unless acceptance is synthetic."""
        rates = self.synthetic_acceptance_rates or ()
        return tuple(rate / before if before else 0.0 for before, rate in itertools.pairwise((1.0, *rates)))


def of_engine(config: EngineConfig) -> SpeculativeConfig | None:
    """The drafting that an engine's options ask for; None: no drafts. Raises ConfigError, also for a draft that cannot be found."""
    raw, options = config.speculative.speculative_config, config.model
    if raw is None:
        return None
    if options.runner == "pooling":
        raise _error("runner is pooling, which writes no tokens; leave one of the two options out")

    def read_config(model: str | None, revision: str | None) -> Mapping[str, Any]:
        name = options.model if model is None else model
        if model is None:
            revision = options.revision
        try:
            return read_json(text_files(name, revision=revision, download_dir=options.download_dir) / "config.json")
        except ModelLoadError as error:
            raise _error(f"model: {error}") from error

    found = SpeculativeConfig.of(raw, tensor_parallel_size=config.parallel.tensor_parallel_size, read_config=read_config)
    if found.method == "grammar" and (config.parallel.num_ranks > 1 or config.parallel.nnodes > 1):
        raise _error(
            "the method grammar is for engines on one host without data-parallel ranks (data_parallel_size with enable_expert_parallel), "
            "but nnodes or they are set; take another method"
        )
    if found.model is not None and not read_config(found.model, found.revision):
        raise _error(f"model {found.model!r} has no config.json; give the directory or hub id of a checkpoint")
    return found


_HINTS = {
    **typing.get_type_hints(SpeculativeConfig),
    "method": str,
    "synthetic_acceptance_length": float | None,
    "draft_tensor_parallel_size": int | None,
    "num_speculative_tokens_per_batch_size": list | tuple | None,
}


def _known(raw: Any, tensor_parallel_size: int) -> dict[str, Any]:
    """The entries that are set, of known names and right types. Raises ConfigError."""
    if not isinstance(raw, Mapping):
        raise _error(f"{raw!r} is no JSON object")
    given: dict[str, Any] = {}
    for name, value in raw.items():
        if name not in _HINTS and name not in REFUSED and name not in NO_EFFECT:
            raise _error(unknown_name("name", str(name), [*_HINTS, *REFUSED, *NO_EFFECT]))
        if value is None:
            continue
        if name in NO_EFFECT:
            info_once(f"speculative_config.{name} {value!r} changes nothing here: {NO_EFFECT[name]}")
            continue
        if name in REFUSED:
            reason, *harmless = REFUSED[name]
            if not any(value == entry and type(value) is type(entry) for entry in harmless):
                raise _error(f"{name} is {value!r}, which is not supported: {reason}")
            continue
        if not type_matches(value, _HINTS[name]):
            raise _error(f"{name} is {value!r}, must be {noun(without_none(_HINTS[name])[0])}{_method_hint(name, value)}")
        given[name] = tuple(value) if isinstance(value, list) else value
    if (size := given.pop("draft_tensor_parallel_size", None)) not in (None, tensor_parallel_size):
        raise _error(
            f"draft_tensor_parallel_size is {size}, but drafts are split like the model, over {tensor_parallel_size}; leave it out"
        )
    for name, low in (("prompt_lookup_min", 1), ("prompt_lookup_max", 1), ("disable_by_batch_size", 1)):
        if given.get(name, low) < low:
            raise _error(f"{name} is {given[name]}, must be at least {low}")
    return given


def _method_hint(name: str, value: Any) -> str:
    reason = REJECTION_METHODS_ELSEWHERE.get(value) if name == "rejection_sample_method" and isinstance(value, str) else None
    return "" if reason is None else f"; {value} {reason}"


def _method(given: Mapping[str, Any], read_config: Callable[[str | None, str | None], Mapping[str, Any]]) -> Method:
    """The method as given, else as the model's name implies it, else as its config.json does."""
    model = given.get("model")
    method: str | None = given.get("method")
    if method is None:
        if model is None:
            raise _error(f"neither method nor model is given; {_METHODS_TEXT}")
        method = _method_of_name(model) or _method_of_config(read_config(model, given.get("revision")))
        if method not in METHODS:
            raise _error(f"model {model!r} is a drafter of the kind {method}, which is not supported; {_METHODS_TEXT}")
    if method in ALIASES:
        info_once(f"speculative_config: method {method} is {ALIASES[method]} here")
    method = ALIASES.get(method, method)
    if method in METHODS:
        return typing.cast("Method", method)
    if method in METHODS_ELSEWHERE or method.endswith("_mtp"):
        reason = METHODS_ELSEWHERE.get(
            method, "layers for multi-token prediction are read from checkpoints of the families that docs/SPECULATIVE.md lists"
        )
        raise _error(f"method {method!r} is not supported: {reason}; {_METHODS_TEXT}")
    close = nearest(method, METHODS)
    raise _error(f"method is {method!r}; {_METHODS_TEXT}{f'; did you mean {close!r}?' if close else ''}")


def _method_of_name(model: str) -> str | None:
    if model in _NO_MODEL:
        return "ngram"
    return next((method for part, method in _IN_NAMES.items() if part in model.lower()), None)


def _method_of_config(config: Mapping[str, Any]) -> str:
    if isinstance(kind := config.get("speculators_model_type"), str):
        return kind
    names = " ".join(map(str, [*(config.get("architectures") or ()), config.get("model_type")])).lower()
    other = "eagle3" if "eagle_config" in config or "draft_vocab_size" in config else "draft_model"
    return next((part for part in _IN_CONFIGS if part in names), other)


def _num_drafts(
    given: Mapping[str, Any], method: Method, read_config: Callable[[str | None, str | None], Mapping[str, Any]]
) -> int:
    count = given.get("num_speculative_tokens", DEFAULT_FORCED if method == "grammar" else None)
    if count is None and method == "dflash":
        config = read_config(given["model"], given.get("revision"))
        places = (config, config.get("dflash_config") or {})
        size = next((place["block_size"] for place in places if isinstance(place.get("block_size"), int)), None)
        count = None if size is None else min(size - 1, MAX_DRAFTS)  # the first of a block is the latest token
    if count is None and method == "mtp":
        config = read_config(None, None)
        text = config.get("text_config")
        parts = (config, text) if isinstance(text, dict) else (config,)
        count = next((part[name] for part in parts for name in _NUM_MODULES if isinstance(part.get(name), int)), None)
    if count is None:
        raise _error(f"num_speculative_tokens is missing: the most drafts of a step, 1 to {MAX_DRAFTS}; 3 to 5 are usual")
    if not 1 <= count <= MAX_DRAFTS:
        off = "; for none, leave speculative_config out" if count == 0 else ""
        raise _error(f"num_speculative_tokens is {count}, must be 1 to {MAX_DRAFTS}{off}")
    return int(count)


def _lookup(given: Mapping[str, Any]) -> dict[str, int]:
    """Both bounds; one alone is both."""
    fewest, most = given.get("prompt_lookup_min"), given.get("prompt_lookup_max")
    fewest, most = fewest or most or DEFAULT_LOOKUP, most or fewest or DEFAULT_LOOKUP
    if fewest > most:
        raise _error(f"prompt_lookup_min is {fewest}, must be at most prompt_lookup_max, which is {most}")
    return {"prompt_lookup_min": fewest, "prompt_lookup_max": most}


def _synthetic_rates(values: Mapping[str, Any]) -> tuple[float, ...] | None:
    rates: tuple[float, ...] | None = values.get("synthetic_acceptance_rates")
    length: float | None = values.get("synthetic_acceptance_length")
    count = values["num_speculative_tokens"]
    if values.get("rejection_sample_method") != "synthetic":
        if rates is not None or length is not None:
            raise _error(
                'synthetic acceptance is set, but rejection_sample_method is not "synthetic"; set it, or leave both out'
            )
        return None
    if rates is not None and length is None:
        if len(rates) != count:
            raise _error(f"synthetic_acceptance_rates has {len(rates)} rates, must have {count}, one for each draft")
        if not all(0 <= rate <= 1 for rate in rates) or list(rates) != sorted(rates, reverse=True):
            raise _error(
                f"synthetic_acceptance_rates is {list(rates)}, must hold numbers from 0 to 1, none above the one before it"
            )
        return tuple(map(float, rates))
    if rates is None and length is not None:
        if not 1 <= length <= count + 1:
            raise _error(
                f"synthetic_acceptance_length is {length}, must be 1 to {count + 1}, the tokens of a step with {count} drafts"
            )
        return _rates_of_length(length, count)
    raise _error(
        "rejection_sample_method synthetic needs synthetic_acceptance_rates or synthetic_acceptance_length, and not both"
    )


def _rates_of_length(length: float, count: int) -> tuple[float, ...]:
    """Rates r, r², r³, … whose sum with the token that is always written is the mean length."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**i for i in range(count + 1)) < length else (low, middle)
    return tuple(high**i for i in range(1, count + 1))


def _schedule(values: Mapping[str, Any]) -> tuple[tuple[int, int, int], ...] | None:
    name, most = "num_speculative_tokens_per_batch_size", values["num_speculative_tokens"]
    entries = values.get(name)
    if entries is None:
        return None
    found: list[tuple[int, int, int]] = []
    for entry in entries:
        if not type_matches(entry, tuple[int, ...]) or len(entry) != 3:
            raise _error(f"{name} holds {entry!r}, must hold [first size, last size, drafts of a row]")
        first, last, count = entry
        expected = found[-1][1] + 1 if found else 1
        if first != expected or last < first:
            raise _error(
                f"{name} has the range {first} to {last}, must go on from {expected}: ranges follow without gaps, from 1"
            )
        if not 0 <= count <= most:
            raise _error(
                f"{name} gives {count} drafts to batches of {first} to {last}, must be 0 to {most}, num_speculative_tokens"
            )
        found.append((first, last, count))
    if not found:
        raise _error(f"{name} is empty; give [first size, last size, drafts of a row], or leave it out")
    return tuple(found)


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"


def _error(text: str) -> ConfigError:
    return ConfigError(f"speculative_config: {text}")
