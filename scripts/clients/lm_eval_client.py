"""lm-eval with local-completions (texts and log-likelihoods) and local-chat-completions, on its own tasks without a hub."""

import json
import os
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import lm_eval
from lm_eval.tasks import TaskManager

URL, MODEL = os.environ["URL"], os.environ["MODEL"]
os.environ["OPENAI_API_KEY"] = os.environ["KEY"]
TOKENIZER = os.environ.get("TOKENIZER") or str(Path(__file__).parents[2] / "jaxllm" / "data" / "demo")

GENERATED: dict[str, Any] = {
    "output_type": "generate_until",
    "generation_kwargs": {"until": ["\n", ","], "max_gen_toks": 16, "temperature": 0},
    "metric_list": [{"metric": "exact_match"}],
}
CHOSEN: dict[str, Any] = {
    "output_type": "multiple_choice",
    "doc_to_choice": ["{{answer}}", "{{wrong}}"],
    "metric_list": [{"metric": "acc"}],
}
SUMS = [(f"What is {a} + {b}?", f"{a} + {b} = {a + b}", "") for a in range(21, 29) for b in (15, 34)]
ENDINGS = [("if __name__ ==", " '__main__':", ""), ("class Foo:\n    def __init__(", "self", ""), ("x = 1\nif x ==", " 1:", "")]
CHOICES = [("import", " os", " 7"), ("for i in", " range(n):", " == class"), ("if __name__ ==", " '__main__':", " +++")]
CHOICES += [("with open(path) as", " file:", " 3)"), ("def f(self):\n    return", " self.", " def"), ("while", " True:", " )")]
TASKS = {"sums": (SUMS, GENERATED), "endings": (ENDINGS, GENERATED), "choices": (CHOICES, CHOSEN)}
"""Name to questions with their answers, right and wrong, and what is done with them. The demo model can do all of it."""


def write_task(folder: Path, name: str) -> None:
    rows, kind = TASKS[name]
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps(dict(zip(("question", "answer", "wrong"), row, strict=True))) + "\n" for row in rows))
    task = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "doc_to_text": "{{question}}",
        "doc_to_target": 0 if kind is CHOSEN else "{{answer}}",
        "target_delimiter": "",
        **kind,
    }
    (folder / f"{name}.yaml").write_text(json.dumps(task))  # JSON is YAML


def main() -> None:
    found = {}
    with tempfile.TemporaryDirectory() as temporary:
        os.environ["HF_DATASETS_CACHE"] = temporary
        for name in TASKS:
            write_task(Path(temporary), name)
        for model, path, tasks, more in (
            ("local-completions", "completions", ["endings", "choices"], ",tokenizer_backend=huggingface"),
            ("local-chat-completions", "chat/completions", ["sums"], ""),
        ):
            results = lm_eval.simple_evaluate(
                model=model,
                model_args=f"model={MODEL},base_url={URL}/v1/{path},num_concurrent=4,max_retries=1,tokenizer={TOKENIZER}{more}",
                tasks=tasks,
                task_manager=TaskManager(include_path=temporary, include_defaults=False),
                apply_chat_template=model == "local-chat-completions",
                bootstrap_iters=0,
            )
            for task, values in results["results"].items():
                found[task] = next(value for key, value in values.items() if key in ("acc,none", "exact_match,none"))
    assert all(score > 0.9 for score in found.values()), found
    print(f"lm-eval {version('lm-eval')}: {', '.join(f'{task} {score:.2f}' for task, score in found.items())} right")


if __name__ == "__main__":
    main()
