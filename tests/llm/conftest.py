from pathlib import Path

import pytest

from tests.helpers.tiny_tokenizers import write_tokenizer


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of a model that text processing reads."""
    return write_tokenizer(tmp_path_factory.mktemp("model"), generation_config={"temperature": 0.5, "max_new_tokens": 4})
