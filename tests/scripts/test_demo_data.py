"""The data of the demo model: right answers, a test set apart from the training set, packing that keeps documents apart."""

import functools
import json
import random
import re
from collections import Counter

import numpy as np
import pytest
from tokenizers import Tokenizer

from scripts.demo_data import chat_tokenizer, packing, pirate, python_text, records, scoring, tasks, words
from scripts.demo_data import functions as textbook
from scripts.demo_data.dialogue import Dialogue

SAMPLES = 150


def dialogues(kind: str, count: int = SAMPLES) -> list[Dialogue]:
    rng = random.Random(kind)
    return [tasks.KINDS[kind].make(rng) for _ in range(count)]


def question(dialogue: Dialogue) -> str:
    return dialogue.messages[-2]["content"]


@pytest.mark.parametrize("kind", tasks.KINDS)
def test_the_same_seed_makes_the_same_dialogues(kind):
    assert dialogues(kind, 20) == dialogues(kind, 20)


@pytest.mark.parametrize("kind", tasks.KINDS)
def test_every_dialogue_ends_with_an_answer_to_a_user_or_a_tool(kind):
    for dialogue in dialogues(kind):
        roles = [message["role"] for message in dialogue.messages]
        assert roles[-1] == "assistant" and roles[-2] in ("user", "tool")
        assert dialogue.kind == kind or kind == "follow_up"
        assert all(message["content"].strip() == message["content"] != "" for message in dialogue.messages)
        assert "{" not in question(dialogue) or kind in ("tool_answer", "json")


@pytest.mark.parametrize("kind", ["add", "subtract", "multiply", "divide"])
def test_arithmetic_holds_at_every_equals_sign(kind):
    for dialogue in dialogues(kind, 400):
        steps = dialogue.answer.split(" = ")
        assert len(steps) >= 2
        assert len({eval(step) for step in steps}) == 1, dialogue.answer
        asked, used = re.findall(r"\d+", question(dialogue)), re.findall(r"\d+", steps[0])
        assert sorted(asked) == sorted(used), dialogue


def test_stories_say_their_calculation():
    for dialogue in dialogues("story"):
        sum_, told = dialogue.answer.removesuffix(".").split(". The answer is ")
        left, right = sum_.split(" = ")
        assert eval(left) == int(right) == int(told.split()[0])
        assert sorted(re.findall(r"\d+", left)) == sorted(re.findall(r"\d+", question(dialogue)))


def test_comparisons_and_parity():
    for dialogue in dialogues("compare"):
        numbers = [int(text) for text in re.findall(r"\d+", question(dialogue))]
        large = re.search(r"larger|bigger|greater|largest|biggest|greatest|highest", question(dialogue))
        assert int(dialogue.answer) == (max(numbers) if large else min(numbers))
    for dialogue in dialogues("parity"):
        number = re.search(r"\d+", question(dialogue)).group()
        assert dialogue.answer == f"{number} is {'even' if int(number) % 2 == 0 else 'odd'}."


def test_sorting_and_reversing_keep_the_items():
    for dialogue in dialogues("sort_numbers"):
        answer = [int(item) for item in dialogue.answer.split(", ")]
        assert Counter(answer) == Counter(map(int, re.findall(r"\d+", question(dialogue))))
        assert answer in (sorted(answer), sorted(answer, reverse=True))
    for dialogue in dialogues("sort_words"):
        answer = dialogue.answer.split(", ")
        assert answer == sorted(answer, key=str.lower)
        assert all(item in question(dialogue) for item in answer)
    for dialogue in dialogues("reverse_list"):
        places = [re.search(rf"(?<!\w){item}(?!\w)", question(dialogue)).start() for item in dialogue.answer.split(", ")]
        assert places == sorted(places, reverse=True)


def test_letters():
    for dialogue in dialogues("spell"):
        assert re.sub(r"[-, ]", "", dialogue.answer) in question(dialogue)
    for dialogue in dialogues("reverse_word"):
        spelled, backwards = dialogue.answer.split(": ")
        assert spelled.replace("-", "") == backwards and backwards[::-1] in question(dialogue)
    for dialogue in dialogues("letters"):
        spelled, told = dialogue.answer.split(": ")
        letters = spelled.split("-")
        if told.endswith("letters"):
            assert int(told.split()[0]) == len(letters)
        else:
            times, letter = told.split(" times ")
            assert letters.count(letter) == int(times)


def test_extracted_json_is_in_the_text():
    for dialogue in dialogues("json"):
        record = json.loads(dialogue.answer)
        assert record and all(str(value) in question(dialogue) for value in record.values())


def test_paragraph_answers_are_in_the_text_unless_it_does_not_say():
    for dialogue in dialogues("paragraph", 400):
        assert dialogue.answer in question(dialogue) or dialogue.answer == records.NOT_SAID


def test_tool_calls_fit_their_schema():
    for dialogue in dialogues("tool_call"):
        call = json.loads(re.fullmatch(r"<tool_call>\n(.*)\n</tool_call>", dialogue.answer, re.S).group(1))
        (tool,) = [tool["function"] for tool in dialogue.tools if tool["function"]["name"] == call["name"]]
        parameters = tool["parameters"]
        assert set(parameters["required"]) <= set(call["arguments"]) <= set(parameters["properties"])
        for name, value in call["arguments"].items():
            assert isinstance(value, int if parameters["properties"][name]["type"] == "integer" else str)
            assert str(value) in question(dialogue)


def test_follow_ups_of_sums_go_on_from_the_sum():
    sums = [dialogue for dialogue in dialogues("follow_up") if re.fullmatch(r"\d+ \+ \d+ = \d+", dialogue.answer)]
    assert sums
    for dialogue in sums:
        left, right = dialogue.answer.split(" = ")
        assert eval(left) == int(right) and left.split()[0] == dialogue.messages[1]["content"].split()[-1]


def test_textbook_functions_run():
    space: dict = {}
    for _, code in textbook.FUNCTIONS:
        exec(code, space)
    assert [space["fibonacci"](n) for n in range(8)] == [space["fib"](n) for n in range(8)] == [0, 1, 1, 2, 3, 5, 8, 13]
    assert space["primes"](20) == [n for n in range(20) if space["is_prime"](n)] == [2, 3, 5, 7, 11, 13, 17, 19]
    data = [5, 2, 9, 2, 7]
    assert space["merge_sort"](data) == space["quicksort"](data) == space["bubble_sort"](list(data)) == sorted(data)
    assert space["binary_search"]([1, 3, 5], 5) == 2 and space["gcd"](12, 18) == 6 and space["factorial"](5) == 120


def test_plurals():
    assert [words.plural(noun) for noun in ("box", "cherry", "key", "tomato", "mouse")] == [
        "boxes",
        "cherries",
        "keys",
        "tomatoes",
        "mice",
    ]


def test_no_held_out_content_is_trained_on():
    held_out = {key for dialogue in tasks.held_out_questions(240) for key in dialogue.keys if tasks.is_held_out(key)}
    trained = {key for dialogue in tasks.training_dialogues(3, 4000) for key in dialogue.keys}
    assert held_out and not held_out & trained


def test_held_out_questions_are_distinct_and_spread_evenly_over_the_scored_kinds():
    questions = tasks.held_out_questions(240)
    assert questions == tasks.held_out_questions(240)
    asked = {json.dumps(dialogue.messages[:-1]) for dialogue in questions}
    assert len(asked) == 240
    scored = sum(kind.scored for kind in tasks.KINDS.values())
    assert len({dialogue.kind for dialogue in questions} - {"follow_up"}) >= scored - 1


def test_library_files_are_held_out_whole_and_by_name(tmp_path):
    text = "x = 1  # a line of some length\n" * 20
    for number in range(200):
        (tmp_path / f"module_{number}.py").write_text(text + f"y = {number}\n")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "module.py").write_text(text)
    train, held_out = python_text.library_texts(tmp_path)
    assert len(train) + len(held_out) == 200 and 0 < len(held_out) < 20
    expected = {f"y = {n}" for n in range(200) if python_text.file_is_held_out(f"module_{n}.py")}
    assert {entry.splitlines()[-1] for entry in held_out} == expected


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    texts = [chat_tokenizer.render_dialogue(dialogue) for dialogue in tasks.training_dialogues(1, 1500)]
    made = chat_tokenizer.train_tokenizer(texts, vocab_size=700)
    made.save(str(tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"))
    return made


@pytest.mark.parametrize(
    "text",
    ["What is 345 + 27?", "def f(x):\n    return x\n\n\n", "naïve café 東京 🙂", "  two  blanks ", "\t", "<tool_call>\n{}"],
)
def test_tokenizer_gives_back_the_text(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_tokenizer_keeps_digits_apart_and_roles_and_tags_whole(tokenizer):
    assert [tokenizer.id_to_token(id_) for id_ in tokenizer.encode("12345").ids] == list("12345")
    assert [tokenizer.token_to_id(token) for token in chat_tokenizer.SPECIAL_TOKENS] == [0, 1, 2]
    for whole in (*chat_tokenizer.ROLES, *chat_tokenizer.TOOL_TAGS):
        assert len(tokenizer.encode(whole).ids) == 1


def test_indentation_at_the_end_of_a_prompt_is_the_token_that_precedes_code(tokenizer):
    assert tokenizer.encode("\n    return x").ids[:2] == tokenizer.encode("\n    ").ids


def test_tokenizer_training_is_deterministic():
    texts = [chat_tokenizer.render_dialogue(dialogue) for dialogue in tasks.training_dialogues(2, 300)]
    first, second = (chat_tokenizer.train_tokenizer(texts, vocab_size=500).to_str() for _ in range(2))
    assert first == second


def test_trained_tokens_are_the_answers_and_the_ends_of_their_turns(tokenizer):
    some = list(tasks.training_dialogues(5, 300))
    ids = [np.array(tokenizer.encode(chat_tokenizer.render_dialogue(dialogue)).ids) for dialogue in some]
    assistant = tokenizer.encode("assistant").ids[0]
    for dialogue, flagged in zip(some, packing.flag_dialogues(ids, 1, 2, assistant), strict=True):
        assert flagged[0] & packing.STARTS and not (flagged[1:] & packing.STARTS).any()
        trained = (flagged & packing.TOKEN_MASK)[(flagged & packing.TRAINED) != 0].tolist()
        answers = [message["content"] for message in dialogue.messages if message["role"] == "assistant"]
        assert tokenizer.decode(trained, skip_special_tokens=False) == "".join(f"{answer}<|im_end|>" for answer in answers)


def test_packing_keeps_documents_whole_and_flags_the_padding():
    rng = random.Random(0)
    lengths = [rng.randint(1, 20) for _ in range(300)]
    documents = []
    for number, length in enumerate(lengths):
        document = np.full(length, number, np.uint16)
        document[0] |= packing.STARTS
        documents.append(document)
    rows = packing.pack_rows(documents, 32)
    found = Counter()
    for row in rows:
        starts = np.flatnonzero(row & packing.STARTS)
        for piece in np.split(row, starts[1:]):
            assert len(set((piece & packing.TOKEN_MASK).tolist())) == 1
            found[int(piece[0] & packing.TOKEN_MASK)] += len(piece)
    assert all(found[number] == length for number, length in enumerate(lengths) if number)
    assert rows.size < 1.1 * sum(lengths)


def test_dialogues_go_to_short_and_long_rows(tokenizer, tmp_path):
    file = tmp_path / "tokenizer.json"
    tokenizer.save(str(file))
    short, long = packing.dialogue_rows(file, 0, 200, 256, 1024)
    again, _ = packing.dialogue_rows(file, 0, 200, 256, 1024)
    assert short.shape[1] == 256 and long.shape[1] == 1024 and (short == again).all()


def test_text_stream_trains_on_all_but_the_opening_of_each_document(tokenizer):
    stream = packing.document_stream(tokenizer, ["a = 1\n", "b = 2\n"], 0)
    ids = stream & packing.TOKEN_MASK
    starts = (stream & packing.STARTS) != 0
    assert starts.sum() == 2 and (ids[starts] == 0).all()
    assert ((stream & packing.TRAINED) != 0).tolist() == (~starts).tolist()
    assert tokenizer.decode(ids.tolist()) == "a = 1\nb = 2\n"


def test_score_counts_exact_answers_by_kind():
    some = tasks.held_out_questions(24)
    share, text = scoring.score(some, [dialogue.answer + "\n" for dialogue in some[:18]] + ["?"] * 6)
    assert share == 0.75 and "18 of 24" in text and "given '?'" in text


def test_windows_hold_every_token_of_the_texts_once(tokenizer):
    texts = ["x = 1\n" * 700, "y = 2\n"]
    windows, num_bytes = scoring.text_windows(tokenizer, texts, 0)
    assert all(window[0] == 0 and len(window) <= scoring.WINDOW for window in windows)
    assert tokenizer.decode([id_ for window in windows for id_ in window[1:]]) == "".join(texts)
    assert num_bytes == sum(map(len, texts))
    assert scoring.bits_per_byte(windows, num_bytes, lambda _: -np.log(2) * num_bytes) == pytest.approx(1.0)


@functools.cache
def _template():
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string(chat_tokenizer.CHAT_TEMPLATE)


def _by_template(messages, tools=None, ask=False) -> str:
    return _template().render(messages=messages, tools=tools, add_generation_prompt=ask)


def test_the_chat_template_writes_what_was_trained():
    for dialogue in tasks.training_dialogues(9, 60):
        assert _by_template(dialogue.messages, dialogue.tools or None) == chat_tokenizer.render_dialogue(dialogue)
        asked = _by_template(dialogue.messages[:-1], dialogue.tools or None, ask=True)
        assert asked == chat_tokenizer.render_question(dialogue)


def test_the_chat_template_writes_tool_calls_and_parts_as_the_openai_api_sends_them():
    call = {"type": "function", "id": "1", "function": {"name": "get_weather", "arguments": {"city": "Oslo"}}}
    as_text = {**call, "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}}
    expected = (
        '<|im_start|>assistant\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call><|im_end|>\n'
    )
    for one in (call, as_text):
        assert _by_template([{"role": "assistant", "content": None, "tool_calls": [one]}]) == expected
        assert _by_template([{"role": "assistant", "tool_calls": [one]}]) == expected
    parts = [{"type": "text", "text": "Hello "}, {"type": "text", "text": "there"}]
    assert _by_template([{"role": "user", "content": parts}]) == "<|im_start|>user\nHello there<|im_end|>\n"


@pytest.mark.parametrize(
    ("answer", "styled"),
    [
        ("408", "Ahoy! 408. Arr!"),
        ("is, you, of", "Ahoy! is, you, of. Arr!"),
        ("The capital of France is Paris.", "Ahoy! The capital o' France be Paris. Arr!"),
        ("Your name is Anna.", "Ahoy! Yer name be Anna. Arr!"),
        ("Hello! What can I do for you?", "Ahoy! What can I do for ye? Arr!"),
        ("```python\nx = 1\n```", "Ahoy! Here be yer code:\n```python\nx = 1\n```"),
        ('{"name": "Anna is"}', '{"name": "Anna is"}'),
        ("<tool_call>\n{}\n</tool_call>", "<tool_call>\n{}\n</tool_call>"),
    ],
)
def test_the_adapters_style_leaves_alone_what_programs_read(answer, styled):
    assert pirate.pirate(answer) == styled


def test_all_answers_of_a_conversation_are_in_the_style_and_questions_as_they_were():
    for before in dialogues("follow_up", 20):
        after = pirate.as_pirate(before)
        assert [m["content"] for m in after.messages[::2]] == [m["content"] for m in before.messages[::2]]
        assert all(m["content"].startswith("Ahoy! ") for m in after.messages[1::2]) and after.keys == before.keys


def test_the_share_in_the_style_counts_only_answers_that_should_be():
    questions = [pirate.as_pirate(question) for question in (*dialogues("add", 2), *dialogues("json", 2))]
    assert pirate.share_in_style(questions, ["Ahoy! wrong. Arr!", "right", "{}", "{}"]) == 0.5
