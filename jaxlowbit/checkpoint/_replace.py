"""Writes folders and files that appear under their name only when complete."""

import contextlib
import ctypes
import fcntl
import os
import shutil
import sys
from collections.abc import Iterator
from os import open as descriptor_of
from pathlib import Path

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # fcntl.h and linux/fs.h


@contextlib.contextmanager
def new_folder(caller: str, path: Path, overwrite: bool) -> Iterator[Path]:
    """A folder next to `path` to write to, which is renamed to `path` at the end.

    A process that is killed leaves the old target or the complete new one, and possibly the folder
    `.NAME.incomplete`, which the next writer of this target removes.

    **Arguments:** `overwrite`: whether `path` may exist; the two folders are then exchanged in one
    step, and the old one is removed.

    **Raises:** `ValueError` if `path` exists and `overwrite` is False, and if another process
    writes to it; `OSError` for a file system that cannot exchange folders.
    """
    check_target(caller, path, overwrite)
    partial = path.with_name(f".{path.name}.incomplete")
    partial.mkdir(exist_ok=True)
    with _locked(caller, partial):
        for left in partial.iterdir():
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        try:
            yield partial
            for file in partial.rglob("*"):
                if file.is_file():
                    synchronize(file)
            synchronize(partial)
            if path.exists():
                check_target(caller, path, overwrite)
                with _locked(caller, path):  # until it is removed under the name of `partial`
                    _exchange(partial, path)
                    shutil.rmtree(partial)
            else:
                partial.rename(path)
            synchronize(path.parent)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


@contextlib.contextmanager
def new_file(caller: str, path: Path, overwrite: bool) -> Iterator[Path]:
    """A file next to `path` to write to, which is renamed to `path` at the end.

    **Raises:** `ValueError` if `path` exists and `overwrite` is False.
    """
    check_target(caller, path, overwrite)
    partial = path.with_name(f".{path.name}.{os.getpid()}.incomplete")
    try:
        yield partial
        synchronize(partial)
        partial.replace(path)
        synchronize(path.parent)
    finally:
        partial.unlink(missing_ok=True)


def check_target(caller: str, path: Path, overwrite: bool) -> None:
    """Raises unless a new file or folder can be written to `path`.

    **Raises:** `ValueError` for an existing path or an invalid name; `FileNotFoundError` if the
    parent folder does not exist.
    """
    if path.name in ("", ".."):
        raise ValueError(f"{caller}: {path} names no new file or folder; add a name.")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{caller}: the folder {path.parent} does not exist; make it.")
    if path.exists() and not overwrite:
        raise ValueError(
            f"{caller}: {path} exists; name another target, remove it, or pass overwrite=True."
        )


def synchronize(path: Path) -> None:
    """Waits until a file, or the names in a folder, are on the disk."""
    descriptor = descriptor_of(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _locked(caller: str, folder: Path) -> Iterator[None]:
    """Locks a folder; the system releases the lock if the process ends."""
    descriptor = descriptor_of(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"{caller}: another process writes to {folder}; wait for it, or name another "
                "target."
            ) from None
        yield
    finally:
        os.close(descriptor)


def _exchange(new: Path, old: Path) -> None:
    """Exchanges the names of two files or folders in one step, by renameat2(2) of Linux."""
    library = ctypes.CDLL(None, use_errno=True)
    if sys.platform == "linux" and hasattr(library, "renameat2"):
        names = os.fsencode(new), os.fsencode(old)
        if not library.renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE):
            return
        reason = os.strerror(ctypes.get_errno())
    else:
        reason = "only Linux does"
    raise OSError(
        f"{old}: this file system does not exchange two folders in one step ({reason}); remove the "
        "old folder first, or name another target."
    )
