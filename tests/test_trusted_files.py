"""Files that contain code are read only if no other user could have written or exchanged them."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxllm import trusted_files
from jaxllm.errors import ConfigError


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "above" / "folder" / "file"
    path.parent.mkdir(parents=True, mode=0o755)
    path.write_bytes(b"good")
    return path


@pytest.mark.parametrize("what", ["file", "folder", "above"])
def test_what_is_exchanged_at_any_moment_is_not_read(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Replacement of the file, or of a directory above it, by another user who may write to its parent."""
    bad = tmp_path / "bad" / file.relative_to(tmp_path)
    bad.parent.mkdir(parents=True)
    bad.write_bytes(b"evil")
    for path in (bad, bad.parent):
        path.chmod(0o777)
    place = next(path for path in (file, *file.parents) if path.name == what)
    aside = tmp_path / "aside"

    def read_while(exchanged_at: int) -> bytes | None:
        num_calls = 0

        def exchanging(call):  # type: ignore[no-untyped-def]
            def counted(*args, **named):  # type: ignore[no-untyped-def]
                nonlocal num_calls
                if (num_calls := num_calls + 1) == exchanged_at:
                    place.rename(aside)
                    (tmp_path / "bad" / place.relative_to(tmp_path)).rename(place)
                return call(*args, **named)

            return counted

        with monkeypatch.context() as patch:
            for name in ("open", "stat", "fstat"):
                patch.setattr(trusted_files.os, name, exchanging(getattr(os, name)))
            try:
                return trusted_files.read(file)
            except ConfigError:
                return None
            finally:
                patch.undo()
                if aside.exists():
                    place.rename(tmp_path / "bad" / place.relative_to(tmp_path))
                    aside.rename(place)

    assert {read_while(exchanged_at) for exchanged_at in range(1, 60)} == {b"good", None}


def test_links_on_the_way_are_followed_and_a_file_must_be_none(file: Path, tmp_path: Path) -> None:
    (tmp_path / "absolute").symlink_to(file.parent.parent)
    (tmp_path / "relative").symlink_to("absolute/../above/./folder")
    assert trusted_files.read(tmp_path / "relative" / "file") == b"good"
    with trusted_files.open_directory(tmp_path / "relative") as opened:
        assert opened.path == file.parent.resolve()
    (file.parent / "link").symlink_to("file")
    with pytest.raises(ConfigError, match="link is a symbolic link"):
        trusted_files.read(file.parent / "link")
    file.parent.chmod(0o777)
    with pytest.raises(ConfigError, match=f"{file.parent} can be written by others .*chmod o-w {file.parent}"):
        trusted_files.read(tmp_path / "relative" / "file")
    (tmp_path / "ring").symlink_to("ring")
    with pytest.raises(OSError, match="symbolic links"):
        trusted_files.read(tmp_path / "ring" / "file")


def test_a_link_of_another_user_is_not_followed(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "link").symlink_to(file.parent)
    real = os.stat

    def of_another(name, **named):  # type: ignore[no-untyped-def]
        status = real(name, **named)
        return SimpleNamespace(st_mode=status.st_mode, st_uid=12345) if name == "link" else status

    monkeypatch.setattr(trusted_files.os, "stat", of_another)
    with pytest.raises(ConfigError, match="link belongs to user 12345"):
        trusted_files.read(tmp_path / "link" / "file")


def test_pipes_and_files_that_are_too_large_are_refused_at_once(file: Path) -> None:
    with pytest.raises(ConfigError, match="has 4 bytes, at most 3 are read"):
        trusted_files.read(file, max_bytes=3)
    os.mkfifo(file.parent / "pipe")
    with pytest.raises(ConfigError, match="no regular file"):
        trusted_files.read(file.parent / "pipe")


@pytest.mark.parametrize(
    ("group", "members", "is_own", "is_trusted"),
    [
        ("me", [], True, True),  # a private group, as most systems make for each user
        ("me", ["other"], True, False),
        ("team", [], True, False),
        (None, [], True, True),  # of a volume in Kubernetes
        (None, [], False, False),
    ],
)
def test_a_private_group_may_write(
    file: Path,
    monkeypatch: pytest.MonkeyPatch,
    group: str | None,
    members: list[str],
    is_own: bool,
    is_trusted: bool,
) -> None:
    def group_of(number: int) -> SimpleNamespace:
        if group is None:
            raise KeyError(number)
        return SimpleNamespace(gr_name=group, gr_mem=members)

    file.parent.chmod(0o775)
    monkeypatch.setattr(trusted_files.grp, "getgrgid", group_of)
    monkeypatch.setattr(trusted_files.pwd, "getpwuid", lambda _: SimpleNamespace(pw_name="me"))
    monkeypatch.setattr(trusted_files.pwd, "getpwall", list)
    monkeypatch.setattr(trusted_files.os, "getgroups", lambda: [file.stat().st_gid] if is_own else [])
    monkeypatch.setattr(trusted_files.os, "getegid", lambda: -1)
    if is_trusted:
        assert trusted_files.read(file) == b"good"
    else:
        with pytest.raises(ConfigError, match=f"can be written by others .*chmod g-w {file.parent}"):
            trusted_files.read(file)


def test_a_directory_that_is_made_is_for_its_user_alone(tmp_path: Path) -> None:
    with trusted_files.open_directory(tmp_path / "a" / "b", make=True) as opened:
        assert opened.path == (tmp_path / "a" / "b").resolve()
    assert [path.stat().st_mode & 0o777 for path in (tmp_path / "a", tmp_path / "a" / "b")] == [0o700, 0o700]
    with pytest.raises(FileNotFoundError):
        trusted_files.read(tmp_path / "c" / "file")
