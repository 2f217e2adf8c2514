"""Whole engines of models that see images against what transformers computed (tests/goldens/*/pictures.json)."""

import numpy as np
import pytest

from jaxllm.config import EngineConfig
from jaxllm.engine.core import EngineCore
from tests.helpers import engines, pictures

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", pictures.NAMES)
def test_prompts_of_text_alone(name, tmp_path):
    """Beside a prompt with pictures, each golden has one without."""
    result = pictures.golden(name).results[-1]
    assert not result.pictures
    model = str(pictures.write(name, tmp_path))
    core = EngineCore(EngineConfig.from_options(**{**engines.SMALL, "model": model}))
    answer = engines.run(core, [engines.request("0", result.prompt, max_tokens=64, prompt_logprobs=0)])["0"]
    core.shutdown()
    assert answer.tokens == result.tokens
    np.testing.assert_allclose(answer.prompt_logprobs.logprobs[:, 0], result.prompt_logprobs, rtol=0, atol=1e-4)
