"""The check of chat templates against the dialects that they show."""

from scripts.check_templates import main

TEMPLATE = """{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% for c in m.tool_calls or [] %}
<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ ARGUMENTS }}}
</tool_call>{% endfor %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""


def test_a_template_is_read_if_its_dialect_reads_what_it_writes(tmp_path, capsys):
    for name, arguments in {"json": "c.function.arguments | tojson", "python": "c.function.arguments"}.items():
        (tmp_path / f"{name}.jinja").write_text(TEMPLATE.replace("ARGUMENTS", arguments), encoding="utf-8")
    assert main([str(tmp_path)]) == 1
    right, wrong = capsys.readouterr().out.splitlines()
    assert right.startswith("ok   json: hermes, -: reads content and two calls (thoughts, content and two calls: wrote ")
    assert wrong.startswith("FAIL python: hermes, -: thoughts, content and two calls: wrote ") and "no JSON" in wrong


def test_a_template_that_writes_no_calls_is_told_to_write_none(tmp_path, capsys):
    (tmp_path / "none.jinja").write_text("<tool_call>{% for m in messages %}{{ m.content }}{% endfor %}", encoding="utf-8")
    assert main([str(tmp_path)]) == 0
    assert capsys.readouterr().out == "ok   none: hermes, -: the template writes no calls\n"
