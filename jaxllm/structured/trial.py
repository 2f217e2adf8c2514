"""Compiles one structured output on trial and computes its first masks along a random output, in a process that may be killed."""

import json
import random
import re
import resource
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from jaxllm.errors import GrammarError
from jaxllm.structured.grammar_text import grammar_text
from jaxllm.structured.json_schema import walk
from jaxllm.structured.token_table import Vocabulary, parser_limits
from jaxllm.structured_outputs import StructuredOutputsParams

NUM_STEPS = 24
"""Tokens of the random output."""
MAX_FIRST_MASK_SECONDS = 1.0
"""CPU time of one mask. The first may build what later ones use."""
MAX_LATER_MASK_SECONDS = 0.01
"""CPU time of the masks of the second half of the steps, on average: the engine computes one for every token."""
NOISE_BYTES = 8 << 20
"""Memory that any trial takes: pages that the child no longer shares with its parent, stacks."""
MAX_SEARCH_SECONDS = 1.0
"""CPU time of the search for the place of a fault."""
COMPILE_STACK_BYTES = 32 << 20
MASK_STACK_BYTES = 1 << 20
"""Less than the stack of any thread that computes masks in the engine."""
_ONE_OF = (
    "oneOf constraints are not supported. Enable 'coerce_one_of' option to approximate oneOf with anyOf",
    "oneOf whose schemas may match the same value is not supported; use anyOf",
)
"""Terms of llguidance's messages, and their replacements for callers of this project."""
SIMPLER = "ask for something simpler, such as smaller bounds of repetition"

T = TypeVar("T")


def try_out(params: StructuredOutputsParams, vocabulary: Vocabulary, table: LLTokenizer) -> dict[str, Any]:
    """{"grammar": its text, "num_bytes": memory it takes}. Raises GrammarError if it cannot be used."""
    before = _resident_bytes()
    matcher, text = with_stack(COMPILE_STACK_BYTES, lambda: _compile(params, vocabulary, table))
    with_stack(MASK_STACK_BYTES, lambda: _walk(matcher, params, table))
    return {"grammar": text, "num_bytes": max(_resident_bytes() - before - NOISE_BYTES, 0) + 4 * len(text)}


def _compile(params: StructuredOutputsParams, vocabulary: Vocabulary, table: LLTokenizer) -> tuple[LLMatcher, str]:
    try:
        text = grammar_text(params, vocabulary.split)
    except RecursionError:
        raise GrammarError("is nested too deeply") from None
    matcher = LLMatcher(table, text, log_level=0, limits=parser_limits())
    if matcher.is_error():
        raise GrammarError(readable(matcher.get_error(), params.kind))
    return matcher, text


def _walk(matcher: LLMatcher, params: StructuredOutputsParams, table: LLTokenizer) -> None:
    """Compute the masks of some steps of a random output that the grammar allows."""
    draw, ends = random.Random(0), set(table.eos_tokens)
    seconds: list[float] = []
    for step in range(NUM_STEPS):
        start = time.process_time()
        mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        seconds.append(time.process_time() - start)
        if matcher.is_error():
            raise GrammarError(readable(matcher.get_error(), params.kind))
        if seconds[-1] > MAX_FIRST_MASK_SECONDS:
            break
        allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
        going_on = [token for token in allowed.tolist() if token not in ends] if len(allowed) < 64 else allowed
        if step == 0 and len(going_on) == 0 and params.kind in ("json", "json_object", "choice"):
            raise GrammarError("can never be satisfied")
        if len(allowed) == 0:
            raise GrammarError("cannot be written with the tokens of this model")
        if len(going_on) == 0:
            break
        token = int(draw.choice(going_on))
        if token in ends:
            break
        if not matcher.consume_token(token):  # allowed by the mask: the limits of llguidance are reached
            raise GrammarError(f"is too complex ({readable(matcher.get_error(), params.kind)}); {SIMPLER}")
    later = seconds[NUM_STEPS // 2 :]
    if max(seconds) > MAX_FIRST_MASK_SECONDS or (later and sum(later) / len(later) > MAX_LATER_MASK_SECONDS):
        raise GrammarError(f"takes too long for each token; {SIMPLER}")


def with_stack(num_bytes: int, call: Callable[[], T]) -> T:
    """The result of a call made in a thread with a stack of this size."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)

    previous = threading.stack_size(num_bytes)
    thread = threading.Thread(target=run)
    thread.start()
    threading.stack_size(previous)
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def readable(message: str, kind: str) -> str:
    """An error message of llguidance, without its internals."""
    message = message.split("<state>")[0].replace("<non-verbose/>", "").strip()
    if message.startswith("NoExtension"):
        return "can never be satisfied, or not with the tokens of this model"
    if kind == "regex":
        message = re.sub(r"^at \d+\(\d+\): invalid regex .*? \(in regex\): ", "", message, flags=re.DOTALL)
    message = re.sub(r"^at (\d+)\((\d+)\): ", r"at line \1 column \2: ", message)
    message = re.sub(r"^(\d+)\((\d+)\): ", r"at line \1 column \2: ", message)
    message = re.sub(r"\n +\d+ \| .*", "", message, flags=re.DOTALL)
    message = message.replace("patternProperty regexes", "the patterns of properties (patternProperties, propertyNames)")
    lines = [line.strip() for line in message.splitlines() if line.strip() and not set(line.strip()) <= {"^"}]
    message = " ".join(lines).replace(*_ONE_OF)
    return message if len(message) <= 300 else f"{message[:300]}…"


def pointer_of_fault(params: StructuredOutputsParams, vocabulary: Vocabulary, table: LLTokenizer) -> str | None:
    """The JSON pointer of the innermost schema within a schema that cannot be compiled."""
    root = json.loads(str(params.json))
    if not isinstance(root, dict):
        return None
    shared = {name: root[name] for name in ("$defs", "definitions") if name in root}
    worst: str | None = None
    latest = time.process_time() + MAX_SEARCH_SECONDS
    for pointer, node in walk(root):
        if time.process_time() > latest:
            break
        if not isinstance(node, dict) or (worst is not None and not pointer.startswith(f"{worst}/")):
            continue
        try:
            _compile(StructuredOutputsParams(json={**shared, **node}), vocabulary, table)
        except (GrammarError, ValueError):
            worst = pointer
    return worst


def limit_resources(cpu_seconds: int, extra_bytes: int) -> None:
    """Limit this process to `cpu_seconds` of CPU time and to `extra_bytes` more memory than it has now."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds + 1))
    with open("/proc/self/statm") as file:
        virtual_bytes = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (virtual_bytes + extra_bytes,) * 2)


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()
