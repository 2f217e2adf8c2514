"""A fake engine core for a separate engine process: words of the prompt select its behaviour."""

import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxllm.config import EngineConfig
from jaxllm.engine.fault_points import hold_interpreter
from jaxllm.errors import EngineDeadError, EngineError, InvalidRequestError, ModelLoadError
from jaxllm.kv_transfer import KVTransfer
from jaxllm.outputs import EngineCoreOutput
from jaxllm.progress import Progress
from jaxllm.request import EngineCoreRequest
from jaxllm.scheduler_stats import SchedulerStats
from jaxllm.text.tokenizer import load_tokenizer
from tests.helpers.fake_engine_core import FakeEngineCore

FACTORY = "tests.helpers.served_core:make"
ROLE_FACTORY = "tests.helpers.served_core:make_with_role"
SLOW_FACTORY = "tests.helpers.served_core:make_when_told"
STEP_SECONDS = 0.0005


class ServedFakeCore(FakeEngineCore):
    """Outputs "one two three", repeatedly if it ignores EOS; a prompt's first word may select other behaviour. Keeps blocks for a decode
    engine as long as there is a file "leased" in the model's directory."""

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
            "hold": lambda: hold_interpreter(6.0),
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

    def stats(self) -> SchedulerStats:
        return replace(super().stats(), num_kv_leases=int((Path(self.config.model.model) / "leased").exists()))

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


class FakeCoreWithRole(ServedFakeCore):
    """Keeps a record of its requests in legs.jsonl of the model's directory. One whose blocks are kept for a decode engine gets parameters
    for that. Where the prompt's first word is "unkept" it gets none, where it is "slow" it never ends, and where it is "lose" its step
    fails. A decode engine refuses one that begins with "unwanted"."""

    def add_request(self, request: EngineCoreRequest) -> None:
        super().add_request(request)
        role, transfer = self.config.kv_transfer.kv_role, request.options.kv_transfer
        words = self.tokenizer.decode(request.prompt_token_ids, skip_special_tokens=True).split()
        if words[0] == "lose" and role == "prefill":
            self._deed = self._fail
        if words[0] == "unwanted" and role == "decode":
            del self.running[request.request_id]
            raise InvalidRequestError("not here", "prompt")
        record = {
            "role": role,
            "id": request.request_id,
            "num_tokens": len(request.prompt_token_ids),
            "max_tokens": request.sampling_params.max_tokens,
            "grammar": request.grammar is not None,
            "keeps": transfer is not None and transfer.keep_for_decode,
            "pulls": None if transfer is None else transfer.lease_id,
            "token": os.environ.get("JAXLLM_KV_TOKEN"),
        }
        with (Path(self.config.model.model) / "legs.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")

    def _advance(self, running: Any) -> EngineCoreOutput:
        request = running.request
        if (transfer := request.options.kv_transfer) is None or not transfer.keep_for_decode:
            return super()._advance(running)
        first = self.tokenizer.decode(request.prompt_token_ids, skip_special_tokens=True).split()[0]
        if first == "slow":
            time.sleep(0.01)
            return EngineCoreOutput(request.request_id, [])
        output = super()._advance(running)
        if output.finish_reason is not None and first != "unkept":
            output.num_cached_tokens = 7
            output.kv_transfer_params = {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "remote_engine_id": "engine",
                "remote_request_id": f"lease-of-{request.request_id}",
                "remote_host": "127.0.0.1",
                "remote_port": 14579,
                "remote_block_ids": [[0]],
                "remote_prefill_cached_tokens": output.num_cached_tokens,
            }
        return output

    prefill_address = None

    def meet(self, transfer: KVTransfer) -> None:
        """It fetches no blocks."""

    def end_lease(self, transfer: KVTransfer) -> None:
        with (Path(self.config.model.model) / "legs.jsonl").open("a") as file:
            file.write(json.dumps({"role": self.config.kv_transfer.kv_role, "ended": transfer.lease_id}) + "\n")

    def abort_requests(self, request_ids: list[str]) -> None:
        known = [request_id for request_id in request_ids if request_id in self.running]
        super().abort_requests(request_ids)
        with (Path(self.config.model.model) / "legs.jsonl").open("a") as file:
            for request_id in known:
                file.write(json.dumps({"role": self.config.kv_transfer.kv_role, "aborted": request_id}) + "\n")


def make_with_role(config: EngineConfig, progress: Progress) -> FakeCoreWithRole:
    return FakeCoreWithRole(config)
