"""Where a command's file goes: whole or not at all, and a clear word where it can't."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

#: ``-o -``: standard output.
STDOUT = Path("-")


class CannotWrite(Exception):
    """The output can't be written; the message says why and what to do."""


@contextmanager
def output_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write. It takes the place of ``path`` once it is whole; until then, and on an error, ``path`` stays as it is.

    Raises:
        CannotWrite: It can't be made, or the disk is full.
    """
    if path == STDOUT:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    if path.is_dir():
        raise CannotWrite(f"tracekv: {path} is a directory: name a file with -o")
    # Where something other than a file stands (a pipe, /dev/null), it can't be replaced.
    part = path if path.exists() and not path.is_file() else path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with part.open("wb") as file:
            yield file
        if part != path:
            part.replace(path)
    except OSError as error:
        raise CannotWrite(_reason(path, error)) from error
    finally:
        if part != path:
            part.unlink(missing_ok=True)


def output_directory(path: Path) -> Path:
    """``path`` as a directory, made where it is missing.

    Raises:
        CannotWrite: It can't be made, or isn't one.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CannotWrite(_reason(path, error)) from error
    return path


def _reason(path: Path, error: OSError) -> str:
    if isinstance(error, BrokenPipeError):
        return f"tracekv: {path}: nobody reads it any more"
    where = path.parent if not path.parent.is_dir() else path
    if isinstance(error, FileNotFoundError) and where == path.parent:
        return f"tracekv: {path} can't be written: there is no directory {os.fspath(where)}"
    return f"tracekv: {path} can't be written: {error.strerror or error}. Name another file with -o"
