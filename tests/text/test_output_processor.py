from pathlib import Path
from typing import Any

import pytest

from jaxllm.config import EngineConfig
from jaxllm.kv_transfer import KVTransfer
from jaxllm.metrics.engine_metrics import EngineMetrics
from jaxllm.outputs import EngineCoreOutput, RequestOutput
from jaxllm.request import ErrorKind, FinishReason
from jaxllm.request_options import RequestOptions
from jaxllm.sampling_params import RequestOutputKind, SamplingParams
from jaxllm.text.input_processor import InputProcessor, ParentRequest
from jaxllm.text.output_processor import OutputProcessor
from jaxllm.text.tokenizer import Tokenizer, load_tokenizer
from tests.helpers.fake_engine_core import fake_logprobs, tiny_model_config
from tests.helpers.tiny_tokenizers import write_tokenizer

TEXT = "The quick brown fox jumps over 中文 😀 and sells sea shells"
CUMULATIVE, DELTA, FINAL_ONLY = RequestOutputKind.CUMULATIVE, RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


class Texts:
    """An output processor fed by hand."""

    def __init__(self, tokenizer: Tokenizer | None, **options: Any):
        self.processor = OutputProcessor(tokenizer, **options)
        model_config = tiny_model_config(tokenizer.vocab_size if tokenizer else 1000)
        self.inputs = InputProcessor(EngineConfig(), model_config, 512, tokenizer)

    def add(self, prompt: Any = (1, 2, 3), request_id: str = "r", **params: Any) -> ParentRequest:
        request = self.inputs.process(request_id, prompt, SamplingParams(**{"max_tokens": None, **params}))
        self.processor.add(request)
        return request

    def say(
        self, request: ParentRequest, ids: list[int], reason: FinishReason | None = None, child: int = 0, **fields: Any
    ) -> list[RequestOutput]:
        item = EngineCoreOutput(request.children[child].request_id, ids, reason, **fields)
        return [output for _, output in self.processor.process([item]).outputs]


def test_deltas_put_together_are_the_cumulative_output_and_the_final_one(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    seen: dict[RequestOutputKind, list[Any]] = {}
    for kind in RequestOutputKind:
        texts = Texts(tokenizer)
        request = texts.add(output_kind=kind, logprobs=1, stop=["never", "seashore"])
        outputs = []
        for place, id in enumerate(ids):
            reason = FinishReason.LENGTH if place == len(ids) - 1 else None
            outputs += texts.say(request, [id], reason, new_logprobs=fake_logprobs([id], 1, 1000))
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        seen[kind] = [output.outputs[0] for output in outputs]
    final = seen[FINAL_ONLY][-1]
    assert len(seen[FINAL_ONLY]) == 1 and len(seen[DELTA]) == len(seen[CUMULATIVE]) == len(ids)
    assert (final.text, final.token_ids, final.finish_reason) == (TEXT, ids, "length")
    assert final.cumulative_logprob == pytest.approx(-0.5 * len(ids)) and len(final.logprobs) == len(ids)
    assert seen[CUMULATIVE][-1] == final
    assert all(final.text.startswith(answer.text) for answer in seen[CUMULATIVE])
    assert [len(answer.token_ids) for answer in seen[CUMULATIVE]] == list(range(1, len(ids) + 1)), (
        "later tokens changed a result"
    )
    deltas = seen[DELTA]
    assert "".join(answer.text for answer in deltas) == TEXT
    assert [id for answer in deltas for id in answer.token_ids] == ids
    assert [row for answer in deltas for row in answer.logprobs] == final.logprobs


def test_answers_come_in_order_of_their_index(tokenizer: Tokenizer) -> None:
    texts = Texts(tokenizer)
    request = texts.add(n=3, output_kind=FINAL_ONLY)
    assert texts.say(request, [70], FinishReason.LENGTH, child=2) == []
    assert texts.say(request, [71], FinishReason.LENGTH, child=0) == []
    (output,) = texts.say(request, [72], FinishReason.LENGTH, child=1)
    assert output.finished and output.request_id == "r" and len(texts.processor) == 0
    assert [(answer.index, answer.token_ids) for answer in output.outputs] == [(0, [71]), (1, [72]), (2, [70])]


def test_a_delta_of_several_answers_has_those_that_changed(tokenizer: Tokenizer) -> None:
    texts = Texts(tokenizer)
    request = texts.add(n=2, output_kind=DELTA)
    ids = [child.request_id for child in request.children]
    step = texts.processor.process([EngineCoreOutput(ids[1], [70]), EngineCoreOutput(ids[0], [71])])
    ((internal_id, output),) = step.outputs
    assert internal_id == request.internal_id
    assert [(answer.index, answer.token_ids) for answer in output.outputs] == [(0, [71]), (1, [70])]
    (output,) = texts.say(request, [72], FinishReason.LENGTH, child=1)
    assert not output.finished and [(a.index, a.token_ids, a.finish_reason) for a in output.outputs] == [(1, [72], "length")]


def test_a_cumulative_output_has_all_answers(tokenizer: Tokenizer) -> None:
    texts = Texts(tokenizer)
    request = texts.add(n=2)
    (output,) = texts.say(request, [70], child=1)
    assert [(answer.index, answer.token_ids) for answer in output.outputs] == [(0, []), (1, [70])]


def test_a_stop_string_ends_the_request_here_and_tells_the_engine(tokenizer: Tokenizer) -> None:
    texts = Texts(tokenizer)
    request = texts.add(stop="fox", logprobs=0)
    ids = tokenizer.encode("a fox and more", add_special_tokens=False)
    end = next(n for n in range(len(ids) + 1) if "fox" in tokenizer.decode(ids[:n]))
    step = texts.processor.process(
        [EngineCoreOutput(request.children[0].request_id, ids, new_logprobs=fake_logprobs(ids, 0, 1000))]
    )
    ((_, output),) = step.outputs
    answer = output.outputs[0]
    assert step.engine_ids_to_abort == [request.children[0].request_id] and output.finished
    assert (answer.text, answer.finish_reason, answer.stop_reason) == ("a ", "stop", "fox")
    assert answer.token_ids == ids[:end] and len(answer.logprobs or []) == end, "tokens after the stop string were kept"
    assert answer.cumulative_logprob == pytest.approx(-0.5 * end)
    assert texts.say(request, [70]) == [], "late output came through"


def test_a_stop_string_at_the_last_token_is_the_reason_and_needs_no_abort(tokenizer: Tokenizer) -> None:
    texts = Texts(tokenizer)
    request = texts.add(stop="fox")
    ids = tokenizer.encode("fox", add_special_tokens=False)
    step = texts.processor.process([EngineCoreOutput(request.children[0].request_id, ids, FinishReason.LENGTH)])
    assert step.engine_ids_to_abort == []
    assert (step.outputs[0][1].outputs[0].finish_reason, step.outputs[0][1].outputs[0].stop_reason) == ("stop", "fox")


def test_a_stop_token_has_its_id_but_no_text(tokenizer: Tokenizer) -> None:
    fox = tokenizer.encode("fox", add_special_tokens=False)
    for include, text in ((False, ""), (True, "fox")):
        texts = Texts(tokenizer)
        request = texts.add(include_stop_str_in_output=include)
        (output,) = texts.say(request, fox, FinishReason.STOP, stop_reason=fox[-1])
        answer = output.outputs[0]
        assert (answer.token_ids, answer.finish_reason, answer.stop_reason) == (fox, "stop", fox[-1])
        assert answer.text == (text if len(fox) == 1 or include else tokenizer.decode(fox[:-1]))


def test_prompt_logprobs_begin_with_none(tokenizer: Tokenizer) -> None:
    for kind in (CUMULATIVE, DELTA):
        texts = Texts(tokenizer)
        request = texts.add(prompt=[5, 6, 7], prompt_logprobs=1, output_kind=kind)
        (first,) = texts.say(request, [70], new_prompt_logprobs=fake_logprobs([6, 7], 1, 1000))
        (second,) = texts.say(request, [71], FinishReason.LENGTH)
        assert first.prompt_logprobs is not None and first.prompt_logprobs[0] is None
        assert [list(row or {}) for row in first.prompt_logprobs] == [[], [6, 7], [7, 8]]
        assert second.prompt_logprobs == (None if kind is DELTA else first.prompt_logprobs)


def test_prompt_logprobs_of_several_answers_are_handed_on_once(tokenizer: Tokenizer) -> None:
    texts = Texts(tokenizer)
    request = texts.add(prompt=[5, 6, 7], prompt_logprobs=1, output_kind=DELTA, n=2)
    found = [texts.say(request, [70], child=n, new_prompt_logprobs=fake_logprobs([6, 7], 1, 1000))[0] for n in (1, 0)]
    assert found[0].prompt_logprobs is not None and found[1].prompt_logprobs is None


@pytest.mark.parametrize(("engine", "own", "interval"), [(1, None, 1), (1, 4, 4), (3, 2, 3), (2, 5, 5)])
def test_a_stream_interval_can_only_be_raised(tokenizer: Tokenizer, engine: int, own: int | None, interval: int) -> None:
    texts = Texts(tokenizer, stream_interval=engine)
    request = texts.add(output_kind=DELTA, stream_interval=own)
    sizes = []
    for place in range(12):
        for output in texts.say(request, [70 + place], FinishReason.LENGTH if place == 11 else None):
            sizes.append(len(output.outputs[0].token_ids))
    assert sizes[0] == 1 and sum(sizes) == 12 and all(size == interval for size in sizes[1:-1])


def test_aborting_gives_what_there_is(tokenizer: Tokenizer) -> None:
    for kind, ids in ((CUMULATIVE, [70, 71]), (DELTA, []), (FINAL_ONLY, [70, 71])):
        texts = Texts(tokenizer)
        request = texts.add(output_kind=kind)
        texts.say(request, [70])
        texts.say(request, [71])
        step = texts.processor.abort(["r"])
        ((_, output),) = step.outputs
        assert output.finished and output.outputs[0].finish_reason == "abort" and output.outputs[0].token_ids == ids
        assert step.engine_ids_to_abort == [request.children[0].request_id]
        assert texts.processor.abort(["r"]).outputs == [] and texts.say(request, [72]) == [] and len(texts.processor) == 0


def test_aborting_a_prompt_aborts_its_unfinished_answers(tokenizer: Tokenizer) -> None:
    texts = Texts(tokenizer)
    request = texts.add(n=3, output_kind=FINAL_ONLY)
    texts.say(request, [70], FinishReason.LENGTH, child=1)
    step = texts.processor.abort(["r"])
    assert step.engine_ids_to_abort == [request.children[0].request_id, request.children[2].request_id]
    assert [answer.finish_reason for answer in step.outputs[0][1].outputs] == ["abort", "length", "abort"]


def test_one_id_may_stand_for_several_requests(tokenizer: Tokenizer) -> None:
    texts = Texts(tokenizer)
    first, second = texts.add(), texts.add()
    texts.add(request_id="other")
    assert texts.say(second, [70])[0].outputs[0].token_ids == [70]
    assert len(texts.processor.abort([first.internal_id], internal=True).outputs) == 1
    assert len(texts.processor.abort(["r"]).outputs) == 1 and len(texts.processor) == 1


def test_times_and_counts_are_noted(tokenizer: Tokenizer) -> None:
    texts = Texts(tokenizer)
    request = texts.add()
    (output,) = texts.say(request, [70], num_cached_tokens=2, loaded_tokens={"host": 1})
    assert output.num_cached_tokens == 2 and output.metrics is not None and output.metrics.finished_time is None
    (output,) = texts.say(request, [71], FinishReason.LENGTH, num_preemptions=3)
    metrics = output.metrics
    assert metrics is not None and metrics.first_token_time is not None and metrics.finished_time is not None
    assert metrics.arrival_time <= metrics.first_token_time <= metrics.finished_time
    assert (metrics.num_generation_tokens, metrics.num_preemptions) == (2, 3)
    assert (metrics.num_cached_tokens, metrics.loaded_tokens) == (2, {"host": 1})


def test_full_blocks_of_the_prompt_that_were_not_cached_are_counted(tokenizer: Tokenizer) -> None:
    texts = Texts(tokenizer, cached_block_tokens=4)
    for num_prompt, num_cached, num_created in ((11, 0, 8), (11, 4, 4), (12, 8, 4), (3, 0, 0)):
        (output,) = texts.say(texts.add(list(range(num_prompt))), [70], FinishReason.LENGTH, num_cached_tokens=num_cached)
        assert output.num_cache_creation_tokens == num_created
    (output,) = Texts(tokenizer).say(texts.add(list(range(11))), [70]) or [None]  # another process's request is ignored
    assert output is None


def test_without_a_tokenizer_outputs_have_ids_only() -> None:
    texts = Texts(None)
    (output,) = texts.say(texts.add(logprobs=1), [70], FinishReason.LENGTH, new_logprobs=fake_logprobs([70], 1, 1000))
    answer = output.outputs[0]
    assert answer.text == "" and answer.token_ids == [70] and answer.logprobs is not None
    assert answer.logprobs[0][70].decoded_token is None


def test_flat_logprobs_equal_the_others(tokenizer: Tokenizer, tmp_path: Path) -> None:
    found = []
    for flat in (False, True):
        texts = Texts(tokenizer)
        request = texts.add(logprobs=2, flat_logprobs=flat)
        (output,) = texts.say(request, [70, 71], FinishReason.LENGTH, new_logprobs=fake_logprobs([70, 71], 2, 1000))
        found.append(output.outputs[0].logprobs)
    assert found[1] == found[0] and type(found[1]).__name__ == "FlatLogprobs"


def test_an_error_in_the_output_of_one_request_ends_it_alone(tokenizer: Tokenizer) -> None:
    texts = Texts(tokenizer)
    bad, good = texts.add(request_id="bad", output_kind=DELTA), texts.add(request_id="good", output_kind=DELTA)
    ids = tokenizer.encode("one two", add_special_tokens=False)
    texts.processor._answers[bad.children[0].request_id][1].detokenizer.push = lambda token_id: 1 / 0  # type: ignore[method-assign]
    step = texts.processor.process([EngineCoreOutput(each.children[0].request_id, ids[:1]) for each in (bad, good)])
    outputs = {output.request_id: output for _, output in step.outputs}
    assert outputs["bad"].finished and outputs["bad"].outputs[0].finish_reason == "error"
    assert outputs["bad"].outputs[0].error_kind == "internal" and "ZeroDivisionError" in str(
        outputs["bad"].outputs[0].stop_reason
    )
    assert outputs["good"].outputs[0].token_ids == ids[:1] and not outputs["good"].finished
    assert step.engine_ids_to_abort == [bad.children[0].request_id]
    assert texts.say(bad, ids[1:]) == []
    assert texts.say(good, ids[1:], FinishReason.LENGTH)[0].finished and len(texts.processor) == 0


def test_an_error_in_one_of_several_answers_leaves_the_others(tokenizer: Tokenizer) -> None:
    texts = Texts(tokenizer)
    request = texts.add(n=2, logprobs=1, output_kind=FINAL_ONLY)
    ids = tokenizer.encode("one two", add_special_tokens=False)
    assert texts.say(request, ids, new_logprobs="not logprobs") == []
    (output,) = texts.say(request, ids, FinishReason.LENGTH, child=1, new_logprobs=fake_logprobs(ids, 1, 1000))
    assert [answer.finish_reason for answer in output.outputs] == ["error", "length"]
    assert output.outputs[1].text == "one two" and output.finished and len(texts.processor) == 0


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_an_output_that_cannot_be_put_together_ends_the_request(tokenizer: Tokenizer, kind: RequestOutputKind) -> None:
    texts = Texts(tokenizer)
    request = texts.add(n=2, output_kind=kind)
    ids = tokenizer.encode("one two", add_special_tokens=False)
    texts.processor._answers[request.children[0].request_id][1].completion = lambda **kwargs: 1 / 0  # type: ignore[method-assign]
    outputs = texts.say(request, ids, FinishReason.LENGTH) + texts.say(request, ids, FinishReason.LENGTH, child=1)
    assert len(outputs) == 1 and outputs[0].finished and len(texts.processor) == 0
    assert [answer.finish_reason for answer in outputs[0].outputs] == ["error", "error"]


def test_an_error_of_the_core_reaches_the_caller_with_its_kind(tokenizer: Tokenizer) -> None:
    texts = Texts(tokenizer)
    request = texts.add()
    fields = {"stop_reason": "too late", "error_kind": ErrorKind.TIMEOUT}
    (output,) = texts.say(request, [], FinishReason.ERROR, **fields)
    answer = output.outputs[0]
    assert (answer.finish_reason, answer.stop_reason, answer.error_kind) == ("error", "too late", ErrorKind.TIMEOUT)


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_transfer_parameters_come_with_the_last_output_of_the_request(tokenizer: Tokenizer, kind: RequestOutputKind) -> None:
    texts, params = Texts(tokenizer), {"do_remote_prefill": True, "remote_port": 1}
    request = texts.add(output_kind=kind, n=2)
    outputs = texts.say(request, [70], FinishReason.LENGTH, kv_transfer_params=params)
    assert all(output.kv_transfer_params is None for output in outputs)
    (last,) = texts.say(request, [71], FinishReason.LENGTH, child=1)
    assert last.finished and last.kv_transfer_params == params


@pytest.mark.parametrize(("told", "expected"), [(None, 16), (0, 0), (2, 2), (99, 3)])
def test_cached_tokens_are_those_that_the_prefill_engine_found(tokenizer: Tokenizer, told: int | None, expected: int) -> None:
    texts = Texts(tokenizer, cached_block_tokens=1)
    request = texts.inputs.process(
        "r", [1, 2, 3], SamplingParams(), options=RequestOptions(kv_transfer=KVTransfer(num_cached_tokens=told))
    )
    texts.processor.add(request)
    (output,) = texts.say(request, [70], FinishReason.LENGTH, num_cached_tokens=16)
    assert output.num_cached_tokens == expected
    assert output.num_cache_creation_tokens == max(0, 3 - expected), "the prefill engine computed and keeps the others"


def test_a_request_that_moves_is_counted_where_it_goes(tokenizer: Tokenizer) -> None:
    counters = [EngineMetrics("m", 100, engine=str(replica)) for replica in range(2)]
    texts = Texts(tokenizer, metrics=counters)
    request = texts.add()
    texts.processor.moved(request.children[0].request_id, 1, KVTransfer(num_cached_tokens=2))
    (output,) = texts.say(request, [70], FinishReason.LENGTH, num_cached_tokens=0)
    assert output.num_cached_tokens == 2
    assert [each.generation_tokens for each in counters] == [0, 1]
    assert counters[1].prompt_tokens_cached == 0, "the counters have what the engine itself found"
    num_computed = len(request.prompt_token_ids) - 2
    assert [each.prompt_tokens_handed_over for each in counters] == [num_computed, 0]
    several = texts.add(n=2)
    for child in several.children:
        texts.processor.moved(child.request_id, 1, KVTransfer(num_cached_tokens=2))
    assert counters[0].prompt_tokens_handed_over == 2 * num_computed, "answers to one prompt share what was computed"
    begun = texts.add(request_id="begun")
    (output,) = texts.say(begun, [70], num_cached_tokens=1)
    texts.processor.moved(begun.children[0].request_id, 1, KVTransfer(num_cached_tokens=1))
    (output,) = texts.say(begun, [71], FinishReason.LENGTH, num_cached_tokens=3)
    assert output.num_cached_tokens == 1 and [each.prompt_tokens for each in counters] == [3, 3]
    assert [each.generation_tokens for each in counters] == [1, 2], "its first token counts where its prompt was computed"
    assert counters[0].prompt_tokens_handed_over == 2 * num_computed, "and so does its prompt, once"
    texts.processor.moved("unknown", 1, None)
