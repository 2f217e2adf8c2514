"""`jaxllm generate`: prompts in, text (or JSON lines) out. Stdout holds nothing else."""

import argparse
import contextlib
import dataclasses
import json
import re
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxllm.batches import each
from jaxllm.cli import options, prompts, running, terminal
from jaxllm.cli.flags import engine_flags, sampling_flags
from jaxllm.cli.forms import add_form_arguments, read_form
from jaxllm.cli.images import add_image_argument, given_files, read_image, text_of, with_images
from jaxllm.cli.parser import Parser, UsageError
from jaxllm.cli.streaming import Answer, stream
from jaxllm.config import ModelOptions
from jaxllm.errors import InvalidRequestError
from jaxllm.flag_arguments import spelling
from jaxllm.hub import CONFIG_FILES, KNOWN
from jaxllm.progress import SILENT, Progress
from jaxllm.sampling_params import RequestOutputKind, SamplingParams
from jaxllm.text.chat_media import MANY

if TYPE_CHECKING:
    from jaxllm.llm import LLM
    from jaxllm.lora_request import LoRARequest
    from jaxllm.outputs import RequestOutput

_LIKE_A_MODEL = re.compile(r"(\.{0,2}|~)/\S+|[A-Za-z0-9][\w.-]*/[\w.-]+")
"""A path, or owner/name as on the hub."""

ABOUT = "Write on from each prompt, or answer it with --chat."
EXAMPLES = """examples:
  jaxllm generate                                       a demo prompt, written on by the demo model
  jaxllm generate --chat "What is 27 + 15?"             an answer instead of a continuation
  jaxllm generate -m Qwen/Qwen3-0.6B "Once upon a time" --max-tokens 100 --temperature 0
  jaxllm generate -m Qwen/Qwen3-VL-2B-Instruct --chat --image photo.jpg "What is this?"
  jaxllm generate --file prompts.jsonl --json > answers.jsonl
  jaxllm generate -m Qwen/Qwen3-0.6B --lora sql=./my-adapter "SELECT"
  jaxllm generate --json-schema person.json "A person as JSON: "
  cat story.txt | jaxllm generate -"""


def add_arguments(parser: Parser) -> None:
    add = parser.add_argument
    text = (
        "text to write on from; - reads all of stdin; a model's directory, GGUF file or known name (demo, smollm2) before all "
    )
    add("prompts", nargs="*", metavar="PROMPT", help=text + "prompts is taken for --model")
    text = "prompts to run: a line each; in a .jsonl file objects with prompt, prompt_token_ids or messages, "
    add("-f", "--file", metavar="FILE", help=text + "and sampling values for that line; - is stdin")
    add("--chat", action="store_true", help="treat prompts as messages of a user, in the model's chat template")
    add("--system", help="system message for --chat")
    add_image_argument(parser, "before each prompt")
    add("--json", action="store_true", help="a JSON object per prompt, with token ids and why it ended")
    options.add_lora_argument(parser, "LoRA adapter that answers all prompts")
    add_form_arguments(parser)
    options.add_common_arguments(parser)
    parser.add_flags(sampling_flags())
    parser.add_flags(engine_flags())


def run(arguments: argparse.Namespace) -> int:
    """Generate, print in the order of the prompts, close with a line of statistics. Returns the exit code."""
    _take_model(arguments)
    chosen = options.engine_options(arguments)
    sampling = options.sampling_options(arguments, sampling_flags())
    if (form := read_form(arguments)) is not None:
        sampling["structured_outputs"] = form
    jobs = _gather(arguments)
    max_logprobs = chosen.get("max_logprobs", ModelOptions().max_logprobs)
    with _origins_in_errors(jobs):
        each(jobs, lambda job: _check(job, sampling, max_logprobs), "prompt")
    if not arguments.json:
        _refuse_what_text_cannot_show(chosen, sampling, jobs)
    lora_request = options.the_lora_request(arguments, chosen)
    if arguments.dry_run:
        return running.dry_run(chosen)
    if jobs[0].origin == "demo" and not arguments.quiet:
        terminal.note(f"no prompt was given; here is one for the model:\n{jobs[0].prompt}")
    progress = options.progress_for(arguments, chosen)
    with running.opened_llm(chosen, progress, lora_request) as llm, _origins_in_errors(jobs):
        defaults = {chat: running.default_sampling(llm, chat=chat) for chat in {job.messages is not None for job in jobs}}
        params = [dataclasses.replace(defaults[job.messages is not None], **{**sampling, **job.sampling}) for job in jobs]
        if len(jobs) == 1 and params[0].n == 1 and not arguments.json:
            params[0].output_kind = RequestOutputKind.DELTA
            answer = Answer(after="" if arguments.quiet else _beginning_on_terminal(jobs[0]))
            stream(llm, _as_input(llm, jobs[0]), params[0], answer, lora_request)
            stats, num_finished, faults = answer.stats, int(answer.finished), [answer.fault] if answer.fault else []
        else:
            finished, seconds = _run_batch(llm, jobs, params, lora_request, progress, as_json=arguments.json)
            stats, num_finished, faults = _stats_of(finished.values(), seconds), len(finished), _faults_of(jobs, finished)
    if not arguments.quiet:
        terminal.note(stats.line())
    for fault in faults:
        terminal.note(f"error: {fault}", "red")
    if num_finished < len(jobs):
        terminal.note(f"interrupted: {num_finished} of {len(jobs)} prompts were finished", "red")
        return 130
    return 1 if faults else 0


def _take_model(arguments: argparse.Namespace) -> None:
    """Use a known name, model directory or GGUF file in place of the first prompt as --model; note a prompt that only looks like one."""
    if "model" in arguments or not arguments.prompts:
        return
    first = arguments.prompts[0]
    if _is_model(first):
        arguments.model, arguments.prompts = first, arguments.prompts[1:]
    elif not arguments.quiet and _LIKE_A_MODEL.fullmatch(first):
        terminal.note(f"{first!r} is taken for a prompt; name a model with --model")


def _is_model(name: str) -> bool:
    if name in KNOWN:
        return True
    try:
        path = Path(name).expanduser()
        return any(path.joinpath(name).is_file() for name in CONFIG_FILES) or (path.suffix == ".gguf" and path.is_file())
    except (OSError, ValueError, RuntimeError):  # a prompt may not be a valid path
        return False


def _gather(arguments: argparse.Namespace) -> list[prompts.Prompt]:
    if arguments.system is not None and not arguments.chat:
        raise UsageError("--system needs --chat")
    if arguments.prompts and arguments.file:
        raise UsageError("give prompts as arguments or with --file, not both")
    if arguments.file:
        jobs = prompts.from_file(arguments.file)
    elif arguments.prompts:
        jobs = prompts.from_arguments(arguments.prompts)
    else:
        jobs = [prompts.from_nothing(chat=arguments.chat)]
    if media := [(kind, read_image(path, kind)) for kind, path in given_files(arguments)]:
        jobs = [_with_media(job, media) for job in jobs]
    return [_as_message(job, arguments.system) for job in jobs] if arguments.chat else jobs


def _with_media(job: prompts.Prompt, media: Sequence[tuple[str, bytes]]) -> prompts.Prompt:
    if job.prompt is None:
        kind = media[0][0]
        raise UsageError(
            f"{job.origin}: --{kind} takes prompts of text; write {MANY[kind]} into messages as parts of type {kind}_url"
        )
    return dataclasses.replace(job, media=media)


def _as_message(job: prompts.Prompt, system: str | None) -> prompts.Prompt:
    """Convert a text prompt to a user message; keep messages unchanged, after the system message."""
    if job.prompt_token_ids is not None:
        raise UsageError(f"{job.origin}: --chat takes text or messages, not prompt_token_ids")
    messages = job.messages if job.messages is not None else [{"role": "user", "content": job.prompt}]
    if system is not None:
        messages = [{"role": "system", "content": system}, *messages]
    return dataclasses.replace(job, prompt=None, messages=messages)


def _check(job: prompts.Prompt, sampling: Mapping[str, Any], max_logprobs: int) -> None:
    """Report the errors that need no tokenizer before the model is loaded."""
    if job.prompt == "":
        raise InvalidRequestError("prompt is empty, must have at least 1 token", "prompt")
    SamplingParams(**{**sampling, **job.sampling}).verify_logprobs(max_logprobs)


@contextlib.contextmanager
def _origins_in_errors(jobs: Sequence[prompts.Prompt]) -> Iterator[None]:
    """Name prompts in errors by their origin: the engine numbers prompts, if there are several."""
    try:
        yield
    except InvalidRequestError as error:
        text = f"{jobs[0].origin}: {error}" if jobs[0].is_line else str(error)
        if len(jobs) > 1:
            text = re.sub(r"\bprompt (\d+):", lambda match: f"{jobs[int(match[1])].origin}:", str(error))
        raise InvalidRequestError(text, error.param) from error


def _as_input(llm: "LLM", job: prompts.Prompt) -> Any:
    """The prompt in the engine's form; applies the model's chat template to messages."""
    if job.messages is not None:
        parts = [{"type": kind, kind: content} for kind, content in job.media]
        return llm.render_conversations([*job.messages[:-1], with_images(job.messages[-1], parts)])[0]
    if job.prompt_token_ids is not None:
        return {"prompt_token_ids": job.prompt_token_ids}
    if not job.media:
        return job.prompt
    before = "".join(llm.llm_engine.input_processor.media.placeholders([kind for kind, _ in job.media]))
    data = {kind: [content for its, content in job.media if its == kind] for kind, _ in job.media}
    return {"prompt": f"{before}{job.prompt}", "multi_modal_data": data}


def _beginning_on_terminal(job: prompts.Prompt) -> str:
    """The text that the output continues, where people read both as one; never part of the output."""
    is_shown = job.prompt is not None and job.origin != "demo" and sys.stdout.isatty() and sys.stderr.isatty()
    return job.prompt or "" if is_shown else ""


def _refuse_what_text_cannot_show(chosen: Mapping[str, Any], sampling: Mapping[str, Any], jobs: list[prompts.Prompt]) -> None:
    wordless = "without a tokenizer there is no text to print; add --json for token ids"
    if chosen.get("skip_tokenizer_init"):
        raise UsageError(wordless)
    for where, values in (("", sampling), *((f"{job.origin}: ", {**sampling, **job.sampling}) for job in jobs)):
        for name in ("logprobs", "prompt_logprobs", "logprob_token_ids"):
            if values.get(name) is not None:
                raise UsageError(f"{where}{spelling(name)} shows only with --json")
        if values.get("detokenize") is False:
            raise UsageError(f"{where}{wordless}")


def _run_batch(
    llm: "LLM",
    jobs: Sequence[prompts.Prompt],
    params: Sequence[SamplingParams],
    lora_request: "LoRARequest | None",
    progress: Progress,
    *,
    as_json: bool,
) -> "tuple[dict[int, RequestOutput], float]":
    """Print each answer once all before it are printed; after Ctrl-C or an error, print all other finished ones.

    Returns the finished ones by their numbers, and the time in seconds.
    """
    for one in params:
        one.output_kind = RequestOutputKind.FINAL_ONLY
    if sys.stdout.isatty():
        progress = SILENT  # the printed answers show the progress
    finished: dict[int, RequestOutput] = {}
    next_index = 0
    began = time.perf_counter()
    outputs = llm.generate_iter(each(jobs, lambda job: _as_input(llm, job), "prompt"), params, lora_request=lora_request)
    progress.start("generating", len(jobs), "prompt")
    try:
        with progress, contextlib.suppress(KeyboardInterrupt), contextlib.closing(outputs):
            for index, output in outputs:
                with llm.interrupt:  # no answer is truncated, lost or printed twice
                    finished[index] = output
                    progress.advance()
                    while next_index in finished:
                        next_index += 1
                        _print_answer(next_index - 1, jobs, finished[next_index - 1], as_json=as_json)
    finally:
        seconds = time.perf_counter() - began
        for index in sorted(finished):
            if index >= next_index:
                _print_answer(index, jobs, finished[index], as_json=as_json)
    return finished, seconds


def _stats_of(outputs: "Collection[RequestOutput]", seconds: float) -> terminal.RunStats:
    times = [output.metrics for output in outputs if output.metrics is not None]
    return terminal.RunStats(
        num_prompt_tokens=sum(len(output.prompt_token_ids) for output in outputs),
        num_output_tokens=sum(len(answer.token_ids) for output in outputs for answer in output.outputs),
        first_token_seconds=[t.first_token_time - t.arrival_time for t in times if t.first_token_time is not None],
        total_seconds=seconds,
    )


def _faults_of(jobs: Sequence[prompts.Prompt], finished: "Mapping[int, RequestOutput]") -> list[str]:
    """Why requests failed individually."""
    return [
        f"{jobs[index].origin}: {answer.stop_reason}"
        for index, output in sorted(finished.items())
        for answer in output.outputs
        if answer.finish_reason == "error"
    ]


def _print_answer(index: int, jobs: Sequence[prompts.Prompt], output: "RequestOutput", *, as_json: bool) -> None:
    job = jobs[index]
    if as_json:
        print(json.dumps({"index": index, **job.as_json(), **_as_json(output)}, ensure_ascii=False), flush=True)
        return
    if len(jobs) > 1 and sys.stdout.isatty():
        text = job.prompt or (text_of(job.messages[-1]) if job.messages else f"{len(job.prompt_token_ids or [])} tokens")
        first = text.strip().split("\n")[0]
        terminal.note(f"[{index + 1}/{len(jobs)}] {first if len(first) <= 70 else first[:69] + '…'}")
    for answer in output.outputs:
        print(answer.text, end="" if answer.text.endswith("\n") else "\n", flush=True)


def _as_json(output: "RequestOutput") -> dict[str, Any]:
    answers = []
    for answer in output.outputs:
        record = {name: getattr(answer, name) for name in ("text", "token_ids", "finish_reason", "stop_reason")}
        if answer.cumulative_logprob is not None:
            record["cumulative_logprob"] = answer.cumulative_logprob
        if answer.logprobs is not None:
            record["logprobs"] = list(map(_logprobs, answer.logprobs))
        answers.append(record)
    counts = {"num_prompt_tokens": len(output.prompt_token_ids), "num_cached_tokens": output.num_cached_tokens}
    if output.prompt_logprobs is None:
        return {"outputs": answers, **counts}
    return {"outputs": answers, **counts, "prompt_logprobs": [place and _logprobs(place) for place in output.prompt_logprobs]}


def _logprobs(place: Mapping[int, Any]) -> list[dict[str, Any]]:
    return [{"token_id": token_id, **dataclasses.asdict(entry)} for token_id, entry in place.items()]
