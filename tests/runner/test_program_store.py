"""Programs are stored on disk, in a directory that only this user may write to."""

import json
import os
import pickle
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jaxllm.env import cache_bytes
from jaxllm.errors import ConfigError
from jaxllm.runner.program_pool import use_persistent_cache
from jaxllm.runner.program_store import ProgramStore, local_store, new_artifact, open_artifact, write_manifest
from jaxllm.runner.programs.key import ProgramKey
from jaxllm.runner.row_arrays import RowArrays
from jaxllm.runner.split_program import Pieces, split

KEY = ProgramKey("decode", 4)
DEVICES = jax.devices()[:1]


class Touch:
    """Unpickling it makes a file."""

    def __init__(self, path: Path):
        self._path = path

    def __reduce__(self):
        return Path.touch, (self._path,)


def compiled() -> jax.stages.Compiled:
    rows = RowArrays(jnp.arange(4), jnp.ones((4, 2)), {})
    return (
        jax.jit(lambda rows, x: (rows._replace(last_token_N=rows.last_token_N + x), None), donate_argnums=0)
        .lower(rows, 1)
        .compile()
    )


def artifact(directory, fingerprint=None) -> ProgramStore:
    store = new_artifact(directory, DEVICES)
    store.save(KEY, compiled())
    write_manifest(directory, fingerprint or {"max_num_seqs": 4})
    return open_artifact(directory, fingerprint or {"max_num_seqs": 4}, DEVICES)


def test_a_program_comes_back_with_its_trees_and_donations(tmp_path):
    program = artifact(tmp_path / "a").load(KEY)
    rows = jax.device_put(RowArrays(jnp.arange(4), jnp.ones((4, 2)), {}), DEVICES[0])
    (new, nothing) = program(rows, jnp.asarray(3))
    assert isinstance(new, RowArrays) and nothing is None
    assert new.last_token_N.tolist() == [3, 4, 5, 6]
    assert rows.last_token_N.is_deleted()


@pytest.mark.slow
def test_a_program_that_xla_has_in_its_own_cache_comes_back(tmp_path):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "of XLA"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()  # which remembers the options
    compiled()
    assert any((tmp_path / "of XLA").iterdir())
    jax.clear_caches()
    new, _ = artifact(tmp_path / "a").load(KEY)(RowArrays(jnp.arange(4), jnp.ones((4, 2)), {}), jnp.asarray(3))
    assert new.last_token_N.tolist() == [3, 4, 5, 6]


@pytest.mark.slow
def test_a_program_that_calls_lapack_runs_in_a_process_that_has_lowered_none(tmp_path):
    solve = partial(jax.lax.linalg.triangular_solve, left_side=True, lower=True)
    store = new_artifact(tmp_path / "a", DEVICES)
    store.save(KEY, jax.jit(solve).lower(2 * jnp.eye(3), jnp.ones((3, 1))).compile())
    write_manifest(tmp_path / "a", {})
    code = (
        "import sys, jax, numpy as np; from pathlib import Path; from jaxllm.runner.program_store import open_artifact;"
        "from jaxllm.runner.programs.key import ProgramKey;"
        "solve = open_artifact(Path(sys.argv[1]), {}, jax.devices()[:1]).load(ProgramKey('decode', 4));"
        "print(solve(2 * np.eye(3, dtype='f4'), np.ones((3, 1), 'f4')).tolist())"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "a")], capture_output=True, text=True)
    assert done.stdout.strip() == "[[0.5], [0.5], [0.5]]", done.stderr


def test_a_program_in_pieces_comes_back(tmp_path):
    rows = RowArrays(jnp.arange(4), jnp.ones((4, 2)), {})
    place = jax.sharding.SingleDeviceSharding(DEVICES[0])

    def decoder_layer(x):
        return x * 2

    def program(rows):
        layer, x = jax.jit(decoder_layer), rows.last_token_N + 1
        return rows._replace(last_token_N=layer(layer(x)) + 1), None

    store = new_artifact(tmp_path / "a", DEVICES)
    traced = jax.jit(program, donate_argnums=0).trace(rows)
    in_pieces = split(traced, [True, True], place, Pieces()).compile()
    assert [len(in_pieces.wiring.calls), len(in_pieces.pieces)] == [3, 2], "the sums before and behind the layers are alike"
    store.save(KEY, in_pieces)
    new, nothing = store.load(KEY)(rows)
    assert isinstance(new, RowArrays) and nothing is None
    assert new.last_token_N.tolist() == [5, 9, 13, 17] and new.block_table_NB.tolist() == [[1, 1]] * 4
    assert rows.last_token_N.is_deleted() and not rows.block_table_NB.is_deleted()


def test_what_is_not_stored_is_none(tmp_path):
    assert artifact(tmp_path / "a").load(ProgramKey("decode", 8)) is None


def test_differences_are_named_also_those_that_one_side_lacks(tmp_path):
    artifact(tmp_path / "a", {"jax version": "1", "old": 1, "same": [1, 2]})
    with pytest.raises(
        ConfigError, match='jax version is "2", the artifact has "1"; old is null, the artifact has 1; new is 5'
    ):
        open_artifact(tmp_path / "a", {"jax version": "2", "new": 5, "same": (1, 2)}, DEVICES)


@pytest.mark.parametrize("what", ["directory", "manifest", "program", "the directory above"])
def test_what_others_can_write_is_not_loaded(tmp_path, what):
    directory = tmp_path / "above" / "a"
    store = artifact(directory)
    program = next(directory.glob("*.program"))
    path = {"directory": directory, "manifest": directory / "manifest.json", "program": program}.get(what, directory.parent)
    path.chmod(path.stat().st_mode | 0o002)
    with pytest.raises(ConfigError, match=f"{path} can be written by others .*chmod o-w {path}"):
        open_artifact(directory, {"max_num_seqs": 4}, DEVICES)
        store.load(KEY)


def test_what_belongs_to_another_user_is_not_loaded(tmp_path, monkeypatch):
    store = artifact(tmp_path / "a")
    owner = tmp_path.stat().st_uid
    if owner == 0:
        os.chown(next((tmp_path / "a").glob("*.program")), 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(ConfigError, match="belongs to user"):
        store.load(KEY)


def test_a_cache_that_others_can_write_is_done_without_and_told_once(tmp_path, caplog, monkeypatch):
    cache = tmp_path / "cache"
    store = local_store(cache / "engines", {}, DEVICES)
    assert cache.stat().st_mode & 0o777 == 0o700
    store.save(KEY, compiled())
    monkeypatch.setattr(jax.config, "update", lambda *_: pytest.fail("XLA keeps programs there"))
    cache.chmod(0o777)
    assert store.load(KEY) is None and local_store(cache / "engines", {}, DEVICES) is None
    use_persistent_cache(cache / "programs")
    assert caplog.text.count("compiled programs are not kept") == 1 and f"chmod o-w {cache}" in caplog.text


@pytest.mark.slow
def test_a_user_who_may_write_above_a_store_and_swaps_it_in_a_loop_runs_nothing(tmp_path):
    above, mark = tmp_path / "above", tmp_path / "mark"
    store = ProgramStore(above / "store", DEVICES, writable=False, strict=False)
    for name, content in (("store", b"damaged"), ("evil", pickle.dumps(Touch(mark)))):
        (above / name).mkdir(parents=True)
        (above / name / store._path(KEY).name).write_bytes(content)
    for path in (above, above / "evil", *(above / "evil").iterdir()):
        path.chmod(0o777)
    swaps = (("store", "aside"), ("evil", "store"), ("store", "evil"), ("aside", "store"))
    code = "import os\nwhile True:\n" + "".join(f" os.rename({old!r}, {new!r})\n" for old, new in swaps)
    with subprocess.Popen([sys.executable, "-c", code], cwd=above) as swapping:
        for _ in range(1000):
            assert store.load(KEY) is None
        swapping.kill()
    assert not mark.exists()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 1, "compiled_for": 3}', '{"format": 99, "compiled_for": {}}'])
def test_a_manifest_that_cannot_be_read_is_an_error(tmp_path, text):
    artifact(tmp_path / "a")
    (tmp_path / "a" / "manifest.json").write_text(text)
    with pytest.raises(ConfigError, match="is corrupt|has format 99"):
        open_artifact(tmp_path / "a", {}, DEVICES)


def test_a_directory_without_manifest_is_no_artifact(tmp_path):
    with pytest.raises(ConfigError, match="no compiled artifact"):
        open_artifact(tmp_path, {}, DEVICES)


def test_a_damaged_program_is_an_error_in_an_artifact_and_compiled_anew_in_the_cache(tmp_path):
    strict = artifact(tmp_path / "a")
    path = next((tmp_path / "a").glob("*.program"))
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ConfigError, match="jaxllm compile"):
        strict.load(KEY)
    cache = local_store(tmp_path / "cache", {"a": 1}, DEVICES)
    cache.save(KEY, compiled())
    path = next(cache.directory.glob("*.program"))
    path.write_bytes(b"nonsense")
    assert cache.load(KEY) is None
    cache.save(KEY, compiled())
    assert cache.load(KEY) is not None


def test_nothing_is_saved_in_an_artifact_that_was_opened(tmp_path):
    artifact(tmp_path / "a").save(ProgramKey("decode", 8), compiled())
    assert len(list((tmp_path / "a").iterdir())) == 2


def test_engines_that_differ_have_different_stores_and_the_longest_unused_go(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXLLM_CACHE_BYTES", "40K")
    made = [local_store(tmp_path, {"max_num_seqs": n}, DEVICES) for n in range(12)]
    assert len({store.directory for store in made}) == 12 and all(store.directory.exists() for store in made)
    assert made[0].directory.stat().st_mode & 0o077 == 0
    for age, store in enumerate(made):
        (store.directory / "part").mkdir()
        (store.directory / "part" / "a.program").write_bytes(b"0" * 10_000)
        for file in (store.directory / "manifest.json", store.directory / "part" / "a.program"):
            os.utime(file, (1000 - age, 1000 - age))
    assert local_store(tmp_path, {"max_num_seqs": 11}, DEVICES).directory == made[11].directory
    assert [n for n, store in enumerate(made) if store.directory.exists()] == [0, 1, 2, 11]
    monkeypatch.setenv("JAXLLM_CACHE_BYTES", "0")
    newest = local_store(tmp_path, {"max_num_seqs": 99}, DEVICES)
    assert list(tmp_path.iterdir()) == [newest.directory]
    assert json.loads((newest.directory / "manifest.json").read_text())["compiled_for"] == {"max_num_seqs": 99}


def test_what_xla_kept_is_bounded_too(tmp_path, monkeypatch):
    monkeypatch.setattr(jax.config, "update", lambda *_: None)
    monkeypatch.setenv("JAXLLM_CACHE_BYTES", "2k")
    for age in range(4):
        (tmp_path / f"{age}-cache").write_bytes(b"0" * 900)
        os.utime(tmp_path / f"{age}-cache", (1000 - age, 1000 - age))
        (tmp_path / f"{age}-cache").chmod(0o664)
    tmp_path.chmod(0o755)
    use_persistent_cache(tmp_path)
    assert tmp_path.stat().st_mode & 0o777 == 0o700, "others may write to the files, if they can reach them"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["0-cache", "1-cache"]


@pytest.mark.parametrize(("text", "told"), [("much", "is not a whole number"), ("-1", "must be at least 0")])
def test_a_wrong_size_of_the_cache_is_an_error(monkeypatch, text, told):
    monkeypatch.setenv("JAXLLM_CACHE_BYTES", text)
    with pytest.raises(ConfigError, match=f"JAXLLM_CACHE_BYTES is '{text}': .*{told}"):
        cache_bytes()


def test_a_cache_that_cannot_be_used_is_done_without(tmp_path):
    (tmp_path / "file").write_text("")
    assert local_store(tmp_path / "file", {}, DEVICES) is None
