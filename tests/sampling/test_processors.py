import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.errors import ConfigError, InvalidRequestError
from jaxllm.sampling.columns import pack_columns, unpack_columns
from jaxllm.sampling.processors import Processor, check_processors, read_arguments
from jaxllm.sampling.sampler import sample_full
from jaxllm.sampling.state import SamplingState, admit, pack_admission
from jaxllm.sampling_params import READS_ITSELF, SamplingParams

V = 20
PROCESSORS = (
    Processor("only", lambda logits, context: jnp.where(jnp.arange(V) == context.arguments_RA[:, :1], logits, -jnp.inf), 1),
    Processor(
        "at_most",  # each token at most so often in the output
        lambda logits, context: jnp.where(context.output_count_RV >= context.arguments_RA[:, :1], -jnp.inf, logits),
        1,
    ),
    Processor("nan", lambda logits, context: logits * jnp.nan),
    Processor(
        "no_prompt_then",  # no token of the prompt; the given token after so many outputs
        lambda logits, context: jnp.where(
            (context.num_outputs_R == context.arguments_RA[:, 0])[:, None],
            jnp.where(jnp.arange(V) == context.arguments_RA[:, 1:2], 0.0, -jnp.inf),
            jnp.where(context.in_prompt_RV, -jnp.inf, logits),
        ),
        2,
    ),
)
admit_jit = jax.jit(admit, donate_argnums=0)
full = jax.jit(lambda logits, columns, *rest: sample_full(logits, unpack_columns(columns), *rest, processors=PROCESSORS))


def run(all_params, logits_SRV, prompt=(0, 1)):
    state = SamplingState.zeros(len(all_params) + 1, V, PROCESSORS)
    for row, params in enumerate(all_params):
        params.verify(
            vocab_size=V, max_model_len=50, max_logprobs=5, num_prompt_tokens=2, processors=check_processors(PROCESSORS)
        )
        packed = pack_admission(params, prompt, 2, (), vocab_size=V, processors=PROCESSORS)
        state = admit_jit(state, jnp.int32(row), packed)
    columns, rows = np.stack([pack_columns(params) for params in all_params]), np.arange(len(all_params))
    tokens = []
    for step, logits in enumerate(logits_SRV):
        token, state, _ = full(logits, columns, np.full(len(rows), 2 + step), state, rows)
        tokens.append(token)
    return np.stack(tokens, axis=1).tolist()


def test_only_rows_that_want_a_processor_are_affected():
    logits = np.tile(np.arange(V, dtype=np.float32), (4, 3, 1))
    greedy = {"temperature": 0}
    plain, only, twice = run(
        [
            SamplingParams(**greedy),
            SamplingParams(**greedy, extra_args={"only": [5.0]}),
            SamplingParams(**greedy, extra_args={"at_most": [2]}),
        ],
        logits,
    )
    assert plain == [19] * 4
    assert only == [5] * 4
    assert twice == [19, 19, 18, 18]


def test_a_processor_sees_prompt_and_number_of_outputs():
    logits = np.tile(-np.arange(V, dtype=np.float32), (4, 3, 1))
    tokens, *_ = run([SamplingParams(temperature=0, extra_args={"no_prompt_then": [2, 11]})] * 3, logits)
    assert tokens == [2, 2, 11, 2]


def test_names_must_differ():
    assert check_processors(PROCESSORS) == {"only": 1, "at_most": 1, "nan": 0, "no_prompt_then": 2}
    with pytest.raises(ConfigError, match="only"):
        check_processors([PROCESSORS[0], PROCESSORS[0]])


def test_a_processor_may_read_texts():
    tones = Processor("tone", PROCESSORS[0].function, 1, read=lambda given: [{"calm": 3, "loud": 5}[given[0]]])
    assert check_processors([tones, *PROCESSORS])["tone"] == READS_ITSELF
    params = SamplingParams(extra_args={"tone": ["loud"], "only": [2.0]})
    limits = {"vocab_size": V, "max_model_len": 50, "max_logprobs": 5, "num_prompt_tokens": 2}
    params.verify(**limits, processors=check_processors([tones, *PROCESSORS]))
    read = read_arguments(params, [tones, *PROCESSORS])
    assert read.extra_args == {"tone": [5.0], "only": [2.0]} and params.extra_args["tone"] == ["loud"]
    plain = SamplingParams(extra_args={"only": [2.0]})
    assert read_arguments(plain, [tones, *PROCESSORS]) is plain
    with pytest.raises(InvalidRequestError, match=r"'tone' cannot read \['shrill'\]: KeyError"):
        read_arguments(SamplingParams(extra_args={"tone": ["shrill"]}), [tones])
    with pytest.raises(InvalidRequestError, match="not 2 numbers"):
        read_arguments(params, [Processor("tone", PROCESSORS[0].function, 2, read=lambda given: [1.0])])
