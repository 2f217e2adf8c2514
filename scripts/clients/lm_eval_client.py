"""lm-eval with local-completions (log-likelihoods and texts) and local-chat-completions, on a task of its own without a hub."""

import json
import os
import tempfile
from importlib.metadata import version
from pathlib import Path

import lm_eval
from lm_eval.tasks import TaskManager

URL, MODEL = os.environ["URL"], os.environ["MODEL"]
os.environ["OPENAI_API_KEY"] = os.environ["KEY"]
TOKENIZER = os.environ.get("TOKENIZER") or str(Path(__file__).parents[2] / "jaxllm" / "data" / "demo")

with tempfile.TemporaryDirectory() as folder:
    sums = [(a, b) for a in range(3, 8) for b in range(2, 6)]
    data = Path(folder) / "sums.jsonl"
    data.write_text("".join(json.dumps({"question": f"What is {a} + {b}?", "answer": str(a + b)}) + "\n" for a, b in sums))
    for name, kind, extra in (
        (
            "sums_generated",
            "generate_until",
            "generation_kwargs: {until: ['\\n'], max_gen_toks: 8, temperature: 0}\nmetric_list: [{metric: exact_match}]",
        ),
        ("sums_chosen", "multiple_choice", "doc_to_choice: ['{{answer}}', '1000']\nmetric_list: [{metric: acc}]"),
    ):
        target = "'{{answer}}'" if kind == "generate_until" else "0"
        (Path(folder) / f"{name}.yaml").write_text(
            f"task: {name}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: '{data}'}}}}\ntest_split: test\n"
            f"output_type: {kind}\ndoc_to_text: '{{{{question}}}} '\ndoc_to_target: {target}\n{extra}\n"
        )
    manager = TaskManager(include_path=folder, include_defaults=False)
    common = f"model={MODEL},num_concurrent=4,max_retries=1,tokenizer={TOKENIZER}"
    found = {}
    for model, path, tasks, more in (
        ("local-completions", "completions", ["sums_generated", "sums_chosen"], ",tokenizer_backend=huggingface"),
        ("local-chat-completions", "chat/completions", ["sums_generated"], ""),
    ):
        results = lm_eval.simple_evaluate(
            model=model,
            model_args=f"{common},base_url={URL}/v1/{path}{more}",
            tasks=tasks,
            task_manager=manager,
            apply_chat_template=model == "local-chat-completions",
            bootstrap_iters=0,
        )
        for task, values in results["results"].items():
            found[f"{model} {task}"] = {k: v for k, v in values.items() if k.endswith(",none") and "stderr" not in k}
assert found["local-completions sums_chosen"]["acc,none"] > 0.5, found
print(f"lm-eval {version('lm-eval')}: {found}")
