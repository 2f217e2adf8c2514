"""A fake engine core that gives each request a token at fixed times, for measuring everything else."""

import os
import time
from pathlib import Path

from jaxllm.config import EngineConfig
from jaxllm.outputs import EngineCoreOutput
from jaxllm.progress import Progress
from jaxllm.text.tokenizer import load_tokenizer
from tests.helpers.fake_engine_core import FakeEngineCore

FACTORY = "scripts.measuring.paced_core:make"
STEP_VARIABLE = "JAXLLM_BENCH_STEP_SECONDS"
SAID = "The quick brown fox jumps over the lazy dog, and then it writes a function that adds two numbers. "


class PacedCore(FakeEngineCore):
    """Outputs the same sentence repeatedly."""

    def __init__(self, config: EngineConfig, directory: Path, step_seconds: float):
        tokenizer = load_tokenizer(directory)
        said = tokenizer.encode(SAID, add_special_tokens=False) * 1000
        super().__init__(lambda request: said, vocab_size=tokenizer.vocab_size, config=config, max_model_len=20_000)
        self._step_seconds = step_seconds
        self._next = time.perf_counter()

    def step(self) -> list[EngineCoreOutput]:
        now = time.perf_counter()
        self._next = max(self._next + self._step_seconds, now)
        time.sleep(self._next - now)
        return super().step()


def make(config: EngineConfig, progress: Progress) -> PacedCore:
    """In the form that the engine process requires."""
    from jaxllm.text.model_files import text_files

    return PacedCore(config, text_files(config.model.model), float(os.environ.get(STEP_VARIABLE, "0.01")))
