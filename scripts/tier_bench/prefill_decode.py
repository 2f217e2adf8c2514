"""Time to the first token of a prompt that one engine computes for another."""

import statistics
import threading
import time
from typing import Any

from jaxllm import LLM
from jaxllm.kv_transfer import KVTransfer, read_kv_transfer
from jaxllm.measuring.runs import end_all, greedy, time_first_token
from jaxllm.outputs import EngineCoreOutput
from jaxllm.request_options import RequestOptions
from scripts.tier_bench.engines import Bench, Prompt, new_prompts


def prefill_decode(bench: Bench) -> None:
    """A prefill and a decode engine in one process, on one device, which pass blocks through shared memory."""
    sizes = bench.sizes
    length = sizes.far_prompt
    options = {
        "num_gpu_blocks_override": 3 * length // 16 + 2,
        "max_model_len": length + 64,
        "kv_offloading_size": sizes.far_host_gib,
    }
    prefill, decode = bench.engines.use({**options, "kv_role": "prefill", "kv_port": 0}, {**options, "kv_role": "decode"})
    core: Any = decode.llm_engine.core
    one, both, fetched = [], [], []
    for number in range(2 * sizes.far_repeats + 1):
        alone, passed = new_prompts(decode, [length] * 2, number)
        seconds_alone = time_first_token(decode.llm_engine, alone)
        before = core.stats()
        computing, fetching = _through_both(prefill, decode, passed)
        num_bytes = core.stats().pulled_bytes - before.pulled_bytes
        if not number:  # it connects, and does not count
            time.sleep(sizes.locking_seconds)
        else:
            one.append(1e3 * seconds_alone)
            both.append(1e3 * (computing + fetching))
            fetched.append((1e3 * fetching, num_bytes))
    failures = sum(core.stats().pull_failures)
    ms, num_bytes = (statistics.median(each) for each in zip(*fetched, strict=True))
    alone_ms, both_ms = statistics.median(one), statistics.median(both)
    bench.rows.note(f"first token, {length} tokens, one engine", alone_ms, "ms")
    note = f"of that {ms:.1f} ms at the decode engine" + f"; {failures} pulls failed" * bool(failures)
    bench.rows.note(f"first token, {length} tokens, prefill and decode engine", both_ms, "ms", note=note)
    bench.rows.note("first token, what two engines add", both_ms - alone_ms, "ms", 40.0)
    note = f"{num_bytes / 2**20:.0f} MiB from the request to the first token, waiting and its last step included"
    bench.rows.note("blocks from a prefill engine", num_bytes / ms / 1e6, "GB/s", note=note)


def _through_both(prefill: LLM, decode: LLM, prompt: Prompt) -> tuple[float, float]:
    """Seconds until the prefill engine answers, and from then until the decode engine has a token."""
    began = time.perf_counter()
    answer = _first_output(prefill, prompt, 1, KVTransfer(keep_for_decode=True)).kv_transfer_params
    if answer is None:
        raise RuntimeError("the prefill engine kept no block")
    computed = time.perf_counter()
    storing = threading.Thread(target=_finish, args=(prefill,))
    storing.start()  # the last blocks, while the others are fetched
    _first_output(decode, prompt, 2, read_kv_transfer(answer))
    done = time.perf_counter()
    end_all(decode.llm_engine)
    storing.join()
    return computed - began, done - computed


def _first_output(llm: LLM, prompt: Prompt, num_tokens: int, transfer: KVTransfer | None) -> EngineCoreOutput:
    """The output that has a request's first token, on an idle engine."""
    engine = llm.llm_engine
    options = RequestOptions(kv_transfer=transfer)
    engine.add(engine.input_processor.process("passed on", prompt, greedy(num_tokens), options))  # type: ignore[arg-type]
    while True:
        outputs: list[EngineCoreOutput] = engine.core.step()
        engine.take(outputs)
        for output in outputs:
            if output.error_kind is not None:
                raise RuntimeError(f"the request failed: {output.stop_reason}")
            if output.new_token_ids:
                return output


def _finish(llm: LLM) -> None:
    core = llm.llm_engine.core
    while core.has_unfinished_requests():
        core.step()
