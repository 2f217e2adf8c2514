"""Steps of devices that exchange through each other's memory, with a stand-in for what only GPUs have: XLA's collectives, and a
workspace whose first word is the state."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxllm import LLM, SamplingParams
from jaxllm.engine import early_programs, kernel_choice
from jaxllm.errors import RequestFailedError
from jaxllm.parallel.mesh import tensor_size
from jaxllm.parallel.shards import PEERS_LOST
from jaxllm.runner import peers as peers_module
from jaxllm.runner.programs.key import ProgramKey
from jaxllm.runner.row_arrays import Scores
from jaxllm.runner.sampling import PendingTokens
from jaxllm.scheduler_output import ModelRunnerOutput
from pallas_kernels import collectives
from pallas_kernels.collectives.exchange import FAILED, SILENT, WAITING
from tests.helpers import goldens

pytestmark = pytest.mark.slow

MODEL = goldens.golden("llama_gqa")
PROMPTS = [{"prompt_token_ids": result.prompt} for result in MODEL.results[:3]]
PARAMS = [
    SamplingParams(max_tokens=8, temperature=0),
    SamplingParams(max_tokens=8, temperature=1, seed=3, top_p=0.9),
    SamplingParams(max_tokens=8, temperature=1, seed=4, logprobs=1, repetition_penalty=1.1),
]
OPTIONS = {
    "skip_tokenizer_init": True,
    "max_model_len": 64,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "decode_buckets": (4,),
    "token_buckets": (64,),
    "compilation_cache": False,
}


class StandIn:
    """A Communicator of CPU devices."""

    def __init__(self, mesh):
        self._sharding = NamedSharding(mesh, PartitionSpec("tensor"))
        self._shape = (tensor_size(mesh), collectives.WORKSPACE_BYTES // 4)
        self.num_first_runs = self.num_resets = 0
        self.set_state(WAITING)

    def set_state(self, state):
        words = np.zeros(self._shape, np.uint32)
        words[:, 0] = state
        self.workspace = jax.device_put(words, self._sharding)

    def first_runs(self, run):
        self.set_state(SILENT)
        run()
        self.num_first_runs += 1
        self.set_state(WAITING)

    def reset(self):
        self.num_resets += 1
        self.set_state(WAITING)

    def close(self):
        self.workspace.delete()


@pytest.fixture
def llm(monkeypatch):
    def status(after, *, axis, implementation, workspace):
        return workspace[0, :1].astype(jnp.int32)

    def candidates(*args, **options):
        return {**kernel_choice.candidates(*args, **options), "collectives": ("peer", "xla")}

    monkeypatch.setattr(early_programs, "candidates", candidates)
    monkeypatch.setattr(collectives, "WORKSPACE_BYTES", 4096)
    monkeypatch.setattr(collectives, "choose", lambda op, **case: "xla")
    monkeypatch.setattr(collectives, "status", status)
    monkeypatch.setattr(peers_module, "Communicator", StandIn)
    llm = LLM(str(MODEL.directory), tensor_parallel_size=2, **OPTIONS)
    yield llm
    llm.shutdown()


class Lost:
    """The tokens of a step: those of the first device, which waited in vain, and the error of the second."""

    def __init__(self, error):
        def wait():
            if error is not None:
                raise error

        self.addressable_shards = [types.SimpleNamespace(data=types.SimpleNamespace(block_until_ready=wait))]

    def __array__(self, dtype=None, copy=None):
        return np.full(1, PEERS_LOST, np.int32)


def test_a_step_that_waited_in_vain_says_what_kept_the_other_device():
    def failing(error):
        return functools.partial(PendingTokens([None], Lost(error), Scores(None, None)).collect, ModelRunnerOutput({}))

    memory = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: device 1")
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED: device 1"):
        failing(memory)()
    with pytest.raises(RuntimeError, match="waited too long"):
        failing(None)()


def tokens(llm, params):
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params, use_tqdm=False)]


def test_steps_through_peers_draw_the_same_tokens_and_survive_a_wait_that_was_given_up(llm):
    one = LLM(str(MODEL.directory), **OPTIONS)
    expected = [tokens(one, params) for params in PARAMS]
    one.shutdown()
    runner = llm.llm_engine.core.runner
    communicator, known = runner.peers._communicator, runner.peers._known
    assert runner.shapes.functions.kernels.collectives == "peer"
    assert [tokens(llm, params) for params in PARAMS] == expected

    peers = {key for key in known if runner.shapes.uses_peers(key)}
    assert {key.kind for key in peers} == {"forward", "decode", "sample"}
    assert communicator.num_first_runs == len(peers), "each program has its first runs, once"
    late = {key for key in known if not runner.shapes.uses_peers(key)}
    assert {ProgramKey(*key[:2]).kind for key in late} >= {"sample"}, "the full sampler leaves its exchanges to XLA"

    communicator.set_state(FAILED)
    with pytest.raises(RequestFailedError, match="goes on"):
        tokens(llm, PARAMS[0])
    assert communicator.num_resets >= 1
    assert [tokens(llm, params) for params in PARAMS] == expected
