"""Tests of files that are replaced: a save is complete or has no effect, and leaves nothing behind."""

from __future__ import annotations

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from regard._tools.replacing import replacing
from support.processes import killed_while_writing, script


def save(path: Path, text: str) -> None:
    with replacing(path) as temporary:
        temporary.write_text(text)


def files(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def test_a_save_creates_or_replaces_a_file(tmp_path: Path) -> None:
    for text in ("first", "second"):
        save(tmp_path / "file.txt", text)
        assert (tmp_path / "file.txt").read_text() == text
        assert files(tmp_path) == ["file.txt"]


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "file.txt"
    with pytest.raises(FileNotFoundError, match=rf"^path: .* got {path}; create {path.parent}$"):
        save(path, "first")
    assert files(tmp_path) == []


def test_an_error_leaves_the_previous_file(tmp_path: Path) -> None:
    save(tmp_path / "file.txt", "first")
    for error in (OSError, KeyboardInterrupt):
        with pytest.raises(error), replacing(tmp_path / "file.txt") as temporary:  # noqa: PT012
            temporary.write_text("half")
            raise error
        assert (tmp_path / "file.txt").read_text() == "first"
        assert files(tmp_path) == ["file.txt"]


def test_the_next_save_removes_what_a_killed_process_left(tmp_path: Path) -> None:
    save(tmp_path / "file.txt", "first")
    killed_while_writing(f"""
        from regard._tools.replacing import replacing
        with replacing({str(tmp_path / "file.txt")!r}) as temporary:
            temporary.write_bytes(bytes(10**6))
    """)
    assert (tmp_path / "file.txt").read_text() == "first"
    assert len(files(tmp_path)) == 2
    save(tmp_path / "other.txt", "any save into the folder")
    assert files(tmp_path) == ["file.txt", "other.txt"]


def test_a_killed_process_with_the_same_id(tmp_path: Path) -> None:
    """In a container, a program often has the same process id after each start."""
    (tmp_path / f".regard-saving-{os.getpid()}-0123abcd-xyz").mkdir()
    save(tmp_path / "file.txt", "first")
    assert files(tmp_path) == ["file.txt"]


def test_saves_at_the_same_time(tmp_path: Path) -> None:
    """Threads and processes that save the same file do not remove each other's folders."""
    path = tmp_path / "file.txt"
    with replacing(path) as temporary:
        temporary.write_text("ours")
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(save, [path] * 40, ["theirs"] * 40))
        script(f"""
            from regard._tools.replacing import replacing
            with replacing({str(path)!r}) as temporary:
                temporary.write_text("another process")
        """)
        assert path.read_text() == "another process"
    assert path.read_text() == "ours"
    assert files(tmp_path) == ["file.txt"]


def test_permissions_and_links_are_kept(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    path, link = tmp_path / "folder" / "file.txt", tmp_path / "link.txt"
    path.write_text("first")
    path.chmod(0o640)
    link.symlink_to(path)
    save(link, "second")
    assert link.is_symlink()
    assert path.read_text() == "second"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_devices_are_written_in_place(tmp_path: Path) -> None:
    save(Path(os.devnull), "text")
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)
    with pytest.raises(IsADirectoryError):
        save(tmp_path, "text")
