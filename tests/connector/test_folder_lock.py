"""One runtime folder, one engine: the second is refused, and nobody removes another's files."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from symbolic_engine import SymbolicEngine

from inferscale.errors import EngineError
from inferscale.runtime.folder_lock import LOCK_NAME, FolderLock, remove_runtime_dir
from inferscale.runtime.refusal import REFUSAL_NAME, read_refusal
from inferscale.runtime.secret import load_secret


def fill(folder: Path) -> None:
    load_secret(folder)
    for name in ("residency.sock", REFUSAL_NAME):
        (folder / name).touch()


def test_a_second_lock_is_refused_and_names_the_holder(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path)
    assert (tmp_path / LOCK_NAME).stat().st_mode & 0o777 == 0o600
    with pytest.raises(
        EngineError, match=rf"in use by another engine \(process {os.getpid()}\).*runtime_dir"
    ):
        FolderLock(tmp_path)
    lock.release()
    lock.release()
    assert not (tmp_path / LOCK_NAME).exists()
    again = FolderLock(tmp_path)
    lock.release()  # of the first: it has nothing more to give back
    with pytest.raises(EngineError, match="in use"):
        FolderLock(tmp_path)
    again.release()


def _hold(folder: str, ready: Any) -> None:
    lock = FolderLock(Path(folder))
    ready.set()
    multiprocessing.Event().wait(60)
    lock.release()


def test_the_lock_of_a_process_that_was_killed_is_free(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    process = context.Process(target=_hold, args=(str(tmp_path), ready))
    process.start()
    assert ready.wait(20)
    with pytest.raises(EngineError, match=rf"\(process {process.pid}\)"):
        FolderLock(tmp_path)
    process.kill()
    process.join()
    assert (tmp_path / LOCK_NAME).exists()
    FolderLock(tmp_path).release()


def test_an_engine_that_was_dropped_gives_the_folder_free(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path)
    del lock
    FolderLock(tmp_path).release()


def test_files_are_removed_unless_a_running_engine_holds_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    fill(folder)
    lock = FolderLock(folder)
    remove_runtime_dir(folder)
    assert {path.name for path in folder.iterdir()} == {"secret", "residency.sock", LOCK_NAME}
    lock.release()
    remove_runtime_dir(folder)
    assert not folder.exists()
    remove_runtime_dir(folder)
    assert not folder.exists()


def test_what_others_put_into_the_folder_stays(tmp_path: Path) -> None:
    fill(tmp_path)
    (tmp_path / "mine").touch()
    remove_runtime_dir(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_two_engines_with_one_runtime_dir(make_engine: Callable[..., SymbolicEngine]) -> None:
    first = make_engine()
    folder = Path(first.runtime_dir) / "run"
    secret = (folder / "secret").read_bytes()
    with pytest.raises(EngineError, match="in use by another engine"):
        make_engine(runtime_dir=str(folder))
    assert type(read_refusal(folder)) is EngineError, "the front end of the second learns why"
    remove_runtime_dir(folder)  # as that front end does
    assert (folder / "secret").read_bytes() == secret
    first.close()
    second = make_engine(runtime_dir=str(folder))
    first.close()
    remove_runtime_dir(folder)  # as the front end of the first does, late
    assert (folder / "secret").read_bytes() == second.side.secret == secret
    assert (folder / LOCK_NAME).exists()


def test_an_engine_that_does_not_start_gives_the_folder_free(
    make_engine: Callable[..., SymbolicEngine], tmp_path: Path
) -> None:
    deep = tmp_path / "run"
    deep.mkdir(mode=0o700)
    (deep / "secret").write_bytes(b"short")
    with pytest.raises(EngineError, match="damaged"):
        make_engine(runtime_dir=str(deep))
    FolderLock(deep).release()
