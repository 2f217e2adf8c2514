import dataclasses

import pytest

from jaxllm.cli.flags import (
    NO_FLAGS,
    NOT_IN_FILES,
    all_flags,
    engine_flags,
    request_flags,
    sampling_flags,
    server_flags,
)
from jaxllm.cli.parser import Parser
from jaxllm.config import EngineConfig, flags
from jaxllm.flag_arguments import is_object, read_text, read_value, spelling
from jaxllm.sampling_params import SamplingParams


def parse(*arguments: str) -> dict[str, object]:
    parser = Parser("test", "")
    parser.add_argument("prompts", nargs="*")
    parser.add_flags(engine_flags())
    parser.add_flags(sampling_flags())
    return vars(parser.parse(arguments))


def test_every_engine_option_is_a_flag() -> None:
    assert {flag.name for flag in engine_flags()} == set(EngineConfig().flat())


def test_every_annotated_sampling_field_is_a_flag_or_has_a_reason() -> None:
    assert {flag.name for flag in sampling_flags()} | set(NO_FLAGS) == {flag.name for flag in flags(SamplingParams)}
    fields = {field.name for field in dataclasses.fields(SamplingParams)}
    assert set(request_flags()) | set(NOT_IN_FILES) == fields


def test_sampling_and_engine_share_no_name() -> None:
    assert len(all_flags()) == len(engine_flags()) + len(sampling_flags()) + len(server_flags())


def test_every_default_can_be_read_back_from_text() -> None:
    for flag in all_flags().values():
        if flag.default is not None and not is_object(flag):
            assert read_text(flag, str(flag.default)) == flag.default, flag.name


def test_values_get_the_type_of_their_field() -> None:
    found = parse(
        *("--max-num-seqs", "1k", "--no-enable-prefix-caching", "--decode-buckets", "1,2,4", "--gpu-memory-utilization", "0.5"),
        *("--dtype", "float16", "--stop-token-ids", "1,2", "--stop", "a,b", "--stop", "c", "--temperature", "0"),
        *("--logit-bias", '{"5": 1.5}', "--max-model-len", "auto", "--revision", "none"),
    )
    del found["prompts"]
    assert found == {
        "max_num_seqs": 1000,
        "enable_prefix_caching": False,
        "decode_buckets": (1, 2, 4),
        "gpu_memory_utilization": 0.5,
        "dtype": "float16",
        "stop_token_ids": [1, 2],
        "stop": ["a,b", "c"],
        "temperature": 0.0,
        "logit_bias": {5: 1.5},
        "max_model_len": -1,
        "revision": None,
    }
    EngineConfig.from_options(**{name: value for name, value in found.items() if name in EngineConfig().flat()})


def test_what_is_not_given_is_absent() -> None:
    assert parse() == {"prompts": []}


def test_underscores_and_dashes_are_the_same() -> None:
    assert parse("--max_num_seqs=8") == parse("--max-num-seqs", "8")


def test_prompts_may_stand_between_flags() -> None:
    assert parse("one", "--max-num-seqs", "8", "two", "--", "--three_x")["prompts"] == ["one", "two", "--three_x"]


def test_sub_keys_build_an_object() -> None:
    found = parse(
        "--hf-overrides.rope_scaling.factor", "2", "--hf_overrides.x=text", "--hf-overrides", '{"rope_scaling": {"y": true}}'
    )
    assert found["hf_overrides"] == {"rope_scaling": {"factor": 2, "y": True}, "x": "text"}


def test_sub_keys_of_token_ids_are_numbers() -> None:
    assert parse("--logit-bias.7", "-3")["logit_bias"] == {7: -3}


def test_sub_keys_need_an_object_and_a_value(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--max-num-seqs.x", "2")
    assert "unknown option '--max-num-seqs.x'; did you mean '--max-num-seqs'?" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        parse("--hf-overrides.x")
    assert "--hf-overrides.x needs a key and a value" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        parse("--.7", "3")
    assert "unknown option '--.7'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-num-sqs", "8"], "unknown option '--max-num-sqs'; did you mean '--max-num-seqs'?"),
        (["--max-num-q", "8"], "ambiguous option '--max-num-q': it may be --max-num-queued-reqs, --max-num-queued-tokens"),
        (["--max-num-seqs", "many"], "argument --max-num-seqs: 'many' is not a whole number"),
        (["--dtype", "fp32"], "argument --dtype: unknown value 'fp32' (one of auto, bfloat16, float16, float32)"),
        (["--temperature", "warm"], "argument --temperature: 'warm' is not a number"),
        (["--hf-overrides", "[1]"], "argument --hf-overrides: not a JSON object"),
        (["--hf-overrides", "{"], "argument --hf-overrides: not JSON"),
        (["--logit-bias", '{"a": 1}'], "the keys must be token ids, got 'a'"),
    ],
)
def test_wrong_usage_exits_with_2_and_says_what_is_wrong(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        parse(*arguments)
    assert stop.value.code == 2
    shown = capsys.readouterr()
    assert message in shown.err
    assert shown.out == ""


def test_a_list_of_several_words_is_told_how_lists_are_written(capsys: pytest.CaptureFixture[str]) -> None:
    parser = Parser("test", "")
    parser.add_flags(engine_flags())
    for word, message in (
        ("512", "unexpected argument '512'; join numbers by commas: 8,64\n"),
        ("x", "unexpected argument 'x'\n"),
    ):
        with pytest.raises(SystemExit):
            parser.parse(["--token-buckets", "64", word])
        assert message in capsys.readouterr().err


def test_file_values_are_checked_like_text() -> None:
    known = all_flags()
    assert read_value(known["max_num_seqs"], "1k") == 1000
    assert read_value(known["decode_buckets"], [1, 2]) == (1, 2)
    assert read_value(known["logit_bias"], {"3": 1}) == {3: 1}
    assert read_value(known["stop"], "END") == "END"
    for name, value in [
        ("max_num_seqs", 1.5),
        ("enable_prefix_caching", 1),
        ("decode_buckets", ["a"]),
        ("revision", 12),
        ("dtype", 16),
    ]:
        with pytest.raises(ValueError, match=r"is not|is neither"):
            read_value(known[name], value)


def test_brief_help_names_every_flag() -> None:
    parser = Parser("test", "")
    parser.add_flags(engine_flags())
    text = parser.brief_help()
    assert all(spelling(flag.name) in text for flag in engine_flags())
    assert "--help=kv-cache" in text


def test_help_of_a_group_holds_only_that_group() -> None:
    parser = Parser("test", "")
    parser.add_flags(engine_flags())
    text = parser.help_for("KV cache")
    assert text.startswith("KV cache:\n") and "--block-size" in text
    assert "--max-num-seqs" not in text


def test_help_fits_any_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for columns, widest in (("60", 60), ("3", 80)):
        monkeypatch.setenv("COLUMNS", columns)
        parser = Parser("test", "words " * 50)
        parser.add_flags(engine_flags())
        assert max(map(len, parser.brief_help().splitlines())) <= widest


def test_help_finds_words_in_names_and_texts() -> None:
    parser = Parser("test", "")
    parser.add_flags(engine_flags())
    assert "--long-prefill-token-threshold" in parser.help_for("prefill")
    assert "--enable-chunked-prefill" in parser.help_for("several steps")
    whole = parser.help_for("all")
    assert all(spelling(flag.name) in whole for flag in engine_flags())
    with pytest.raises(SystemExit):
        parser.help_for("nonsense")
