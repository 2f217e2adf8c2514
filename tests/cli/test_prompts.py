import io
import json
from pathlib import Path

import pytest

from jaxllm.cli import prompts
from jaxllm.errors import ConfigError


def written(tmp_path: Path, name: str, text: str) -> str:
    path = tmp_path / name
    path.write_text(text)
    return str(path)


def test_a_text_file_has_a_prompt_per_line(tmp_path: Path) -> None:
    found = prompts.from_file(written(tmp_path, "p.txt", "one\n\n  two {x}\r\n{three\n"))
    assert [(prompt.prompt, prompt.origin.rsplit(":", 1)[1]) for prompt in found] == [
        ("one", "1"),
        ("  two {x}", "3"),
        ("{three", "4"),
    ]


def test_a_jsonl_file_has_prompts_of_three_kinds_with_sampling_values(tmp_path: Path) -> None:
    lines = [
        {"prompt": "hello", "temperature": 0, "max-tokens": 5, "seed": 3},
        {"prompt_token_ids": [1, 2], "logprobs": 2, "detokenize": False},
        {"messages": [{"role": "user", "content": "hi"}], "stop": ["a", "b"]},
    ]
    found = prompts.from_file(written(tmp_path, "p.jsonl", "\n".join(map(json.dumps, lines)) + "\n"))
    assert [prompt.sampling for prompt in found] == [
        {"temperature": 0, "max_tokens": 5, "seed": 3},
        {"logprobs": 2, "detokenize": False},
        {"stop": ["a", "b"]},
    ]
    assert [prompt.as_json() for prompt in found] == [
        {"prompt": "hello"},
        {"prompt_token_ids": [1, 2]},
        {"messages": [{"role": "user", "content": "hi"}]},
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ("[1]", "must be a JSON object"),
        ("{}", "must have exactly one of prompt, prompt_token_ids, messages; has none"),
        ('{"prompt": "a", "prompt_token_ids": [1]}', "has prompt and prompt_token_ids"),
        ('{"prompt": 1}', "prompt must be text"),
        ('{"prompt_token_ids": [1.5]}', "prompt_token_ids must be a list of token ids"),
        ('{"prompt_token_ids": [true]}', "prompt_token_ids must be a list of token ids"),
        ('{"messages": [{"content": "x"}]}', "messages must be a list of {role, content} objects"),
        ('{"prompt": "a", "temprature": 1}', "unknown key 'temprature'; did you mean 'temperature'?"),
        ('{"prompt": "a", "temperature": "hot"}', "temperature: 'hot' is not a number"),
        ('{"prompt": "a", "output_kind": 1}', "unknown key 'output_kind'"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_a_bad_line_is_reported_with_its_number(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        prompts.from_file(written(tmp_path, "p.jsonl", '{"prompt": "fine"}\n\n' + line + "\n"))
    assert "p.jsonl:3: " in str(error.value)
    assert message in str(error.value)


def test_all_bad_lines_are_reported_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"p\.jsonl:1: .*p\.jsonl:2: .*and 2 more bad lines"):
        prompts.from_file(written(tmp_path, "p.jsonl", "x\n" * 12))


def test_a_missing_or_empty_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the prompt file /no/such: No such file"):
        prompts.from_file("/no/such")
    with pytest.raises(ConfigError, match="give a .jsonl file"):
        prompts.from_file("p.json")
    with pytest.raises(ConfigError, match="holds no prompts"):
        prompts.from_file(written(tmp_path, "p.txt", "\n \n"))


def test_stdin_is_json_if_it_begins_with_a_brace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO('\n{"prompt": "a"}\n'))
    assert prompts.from_file("-")[0].prompt == "a"
    monkeypatch.setattr("sys.stdin", io.StringIO("a\nb\n"))
    assert [prompt.origin for prompt in prompts.from_file("-")] == ["stdin:1", "stdin:2"]


def test_a_dash_is_all_of_stdin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("a\nb\n"))
    assert [prompt.prompt for prompt in prompts.from_arguments(["x", "-"])] == ["x", "a\nb\n"]


def test_without_prompts_a_file_on_stdin_is_read_else_the_demo_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open(written(tmp_path, "in", "hello\n")) as file:
        monkeypatch.setattr("sys.stdin", file)
        assert prompts.from_nothing(chat=False).prompt == "hello\n"
    with open("/dev/null") as file:
        monkeypatch.setattr("sys.stdin", file)
        assert prompts.from_nothing(chat=False).prompt == prompts.DEMO_PROMPT
        assert prompts.from_nothing(chat=True).prompt == prompts.DEMO_MESSAGE
