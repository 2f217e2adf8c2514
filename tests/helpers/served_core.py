"""A fake engine core for a separate engine process: words of the prompt select its behaviour."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from jaxllm.config import EngineConfig
from jaxllm.engine.fault_points import hold_interpreter
from jaxllm.errors import EngineDeadError, EngineError, InvalidRequestError, ModelLoadError
from jaxllm.outputs import EngineCoreOutput
from jaxllm.progress import Progress
from jaxllm.request import EngineCoreRequest
from jaxllm.text.tokenizer import load_tokenizer
from tests.helpers.fake_engine_core import FakeEngineCore

FACTORY = "tests.helpers.served_core:make"
SLOW_FACTORY = "tests.helpers.served_core:make_when_told"
STEP_SECONDS = 0.0005


class ServedFakeCore(FakeEngineCore):
    """Outputs "one two three", repeatedly if it ignores EOS; a prompt's first word may select other behaviour."""

    def __init__(self, config: EngineConfig):
        self.tokenizer = load_tokenizer(Path(config.model.model))
        eos = self.tokenizer.eos_token_id
        assert eos is not None
        words = self.tokenizer.encode("one two three", add_special_tokens=False)

        def script(request: EngineCoreRequest) -> list[int]:
            params = request.sampling_params
            return words * (params.max_tokens or 1) if params.ignore_eos else [*words, eos]

        super().__init__(script, vocab_size=self.tokenizer.vocab_size, config=config, max_model_len=20_000)
        self._deeds: dict[str, Callable[[], None]] = {
            "die": self._die,
            "fail": self._fail,
            "hang": lambda: time.sleep(3600),
            "hold": lambda: hold_interpreter(3.0),
            "compile": lambda: self._compile(lambda: False, 1.5),
            "build": lambda: self._compile((Path(config.model.model) / "built").exists, 60.0),
            "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
            "bug": lambda: [][0],
        }
        self._deed: Callable[[], None] | None = None

    def add_request(self, request: EngineCoreRequest) -> None:
        word = self.tokenizer.decode(request.prompt_token_ids, skip_special_tokens=True).split()[0]
        if word == "refuse":
            raise InvalidRequestError("never fits", "prompt")
        if word == "stumble":
            raise RuntimeError("a bug at /some/path")
        super().add_request(request)
        self._deed = self._deeds.get(word, self._deed)

    def step(self) -> list[EngineCoreOutput]:
        deed, self._deed = self._deed, None
        if deed is not None:
            deed()
        time.sleep(STEP_SECONDS)
        return super().step()

    def _die(self) -> None:
        raise EngineDeadError("the device is lost")

    def _fail(self) -> None:
        self.running.clear()
        raise EngineError("bad step")

    def _compile(self, is_done: Callable[[], bool], seconds: float) -> None:
        self.awaited_programs = (1, 3)
        end = time.monotonic() + seconds
        while not is_done() and time.monotonic() < end:
            time.sleep(0.01)
        self.awaited_programs = (0, 0)


def make(config: EngineConfig, progress: Progress) -> ServedFakeCore:
    return ServedFakeCore(config)


def make_when_told(config: EngineConfig, progress: Progress) -> ServedFakeCore:
    """Loads until there is a file "go" in the model's directory, and fails if there is one "bad"."""
    progress.start("loading weights", 4, "B")
    progress.advance(1)
    while not (Path(config.model.model) / "go").exists():
        time.sleep(0.01)
    if (Path(config.model.model) / "bad").exists():
        raise ModelLoadError("the weights are torn")
    return ServedFakeCore(config)
