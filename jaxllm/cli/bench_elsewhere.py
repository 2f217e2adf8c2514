"""Flags and datasets of vLLM's benchmarks that these have not: what each changes, or why it is refused and what to do instead."""

import argparse
from collections.abc import Collection
from typing import Any

from jaxllm.cli.parser import Parser

_DATASET = "its dataset is not offered; write the prompts to a file for --dataset-name custom or sharegpt of `bench serve`"
_PLOT = "`bench serve --plot FILE` draws the run"
REFUSED = {
    "hf-name hf-subset hf-split hf-output-len spec-bench-output-len spec-bench-category speed-bench-dataset-subset "
    "speed-bench-output-len speed-bench-category bfcl-categories blazedit-min-distance blazedit-max-distance "
    "timed-trace-chunk-hash-size timed-trace-sec-multiplier timed-trace-label-timestamp timed-trace-label-input-length "
    "timed-trace-label-output-length timed-trace-label-hash-ids": _DATASET,
    "asr-min-audio-len-sec asr-max-audio-len-sec": "speech is not measured",
    "random-batch-size no-reranker": "each request has one prompt",
    "plot-timeline timeline-itl-thresholds plot-dataset-stats": _PLOT,
    "no-oversample": "a file with fewer prompts is used again; give --num-prompts of at most its number",
    "no-stream": "times of tokens are measured in streams",
    "use-beam-search": "a search streams no tokens whose times could be measured",
    "self-timed probe-request-rate": "requests start as --request-rate, --burstiness and --ramp-up-strategy say",
    "custom-ensure-client-side-data": "prompts of a file are sent as they are",
    "hf-max-batch-size hf-enable-torch-compile": "this engine alone is measured",
    "prequeue-requests": "all prompts are given at once, before the first step",
}
"""Why flags are refused, by their names without the dashes."""
NO_EFFECT = {
    "disable-shuffle skip-chat-template": "prompts of a file are sent in its order and as they are",
    "skip-tokenizer-init": "no tokenizer is loaded without --tokenizer",
    "enable-multimodal-chat": "images are always sent in chat messages",
    "disable-detokenize": "token ids are measured, which are never made text",
    "async-engine": "the engine is measured as `LLM` runs it",
}
"""Flags without a value that have no effect, with the reason."""
DATASETS_ELSEWHERE = (
    *("hf", "sonnet", "burstgpt", "random-rerank", "custom_audio", "custom_image", "spec_bench", "speed_bench"),
    "timed_trace",
)


def add_arguments_of_vllm(parser: Parser) -> None:
    """Flags of vLLM's benchmarks that the parser has not; help does not list them."""
    hidden: dict[str, Any] = {"default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
    for table, action, nargs in ((REFUSED, _Refuse, "*"), (NO_EFFECT, _Note, 0)):
        for name, reason in ((f"--{name}", reason) for names, reason in table.items() for name in names.split()):
            if name not in parser._option_string_actions:
                parser.add_argument(name, action=action, nargs=nargs, const=reason, **hidden)


def dataset(known: Collection[str]) -> Any:
    """The type of --dataset-name: one of the known, with a reason for vLLM's others."""

    def read(text: str) -> str:
        if text in DATASETS_ELSEWHERE:
            raise argparse.ArgumentTypeError(f"{text!r} is not offered (one of {', '.join(known)}): {_DATASET}")
        return text

    return read


class _Refuse(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        parser.error(f"{option_string} is refused: {self.const}")


class _Note(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        parser.notes.append(f"{option_string} changes nothing here: {self.const}")
