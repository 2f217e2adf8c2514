from pathlib import Path

import pytest

from tests.helpers import host_scenario, peft_files, tiny_tokenizers


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a tokenizer and an adapter."""
    directory = tmp_path_factory.mktemp("model")
    (directory / "tokenizer.json").write_text(tiny_tokenizers.ascii_json())
    peft_files.write(directory / "adapter", Path(host_scenario.OPTIONS["model"]))
    return directory
