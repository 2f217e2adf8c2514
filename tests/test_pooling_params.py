import pytest

from jaxllm.errors import InvalidRequestError
from jaxllm.pooling_params import PoolingParams
from jaxllm.sampling_params import RequestOutputKind


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("task", "token_classify"),
        ("task", 3),
        ("use_activation", 1),
        ("skip_reading_prefix_cache", "yes"),
        ("dimensions", 0),
        ("dimensions", True),
        ("dimensions", 2.0),
        ("truncate_prompt_tokens", 0),
        ("truncate_prompt_tokens", -2),
        ("truncation_side", "middle"),
    ],
)
def test_wrong_values_are_named(name, value):
    with pytest.raises(InvalidRequestError, match=f"{name} is {value!r}") as error:
        PoolingParams(**{name: value})
    assert error.value.param == name


def test_a_task_that_is_not_supported_says_what_to_do():
    with pytest.raises(InvalidRequestError, match="LLM.score"):
        PoolingParams(task="score")


def test_there_is_one_output():
    assert PoolingParams(truncate_prompt_tokens=-1).output_kind is RequestOutputKind.FINAL_ONLY
