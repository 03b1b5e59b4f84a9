"""What a connector answered, in plain numbers, and the types of an answer that isn't what the contract says."""

from __future__ import annotations

from typing import Any


def offer(answer: Any) -> tuple[int, bool, str | None]:
    """``(offered, is_async, None)``, or as much of it as can be read and the types of an answer that is no ``(int, bool)``."""
    if isinstance(answer, tuple) and len(answer) == 2:
        offered, is_async = answer
        if type(offered) is int and type(is_async) is bool:
            return offered, is_async, None
        kinds = f"({type(offered).__name__}, {type(is_async).__name__})"
        return (int(offered) if isinstance(offered, (int, float)) else 0), bool(is_async), kinds
    return 0, False, type(answer).__name__


def finished_ids(answer: Any) -> tuple[list[int], list[int], str | None]:
    """The two id lists, and the types of an answer that is no pair of lists of ints."""
    if not isinstance(answer, tuple) or len(answer) != 2:
        return [], [], type(answer).__name__
    kinds = [type(ids).__name__ for ids in answer]
    lists = [list(ids) if ids is not None else [] for ids in answer]
    odd = kinds != ["list", "list"] or not all(type(i) is int for ids in lists for i in ids)
    saved, loaded = ([i for i in ids if isinstance(i, int)] for ids in lists)
    return saved, loaded, f"({', '.join(kinds)})" if odd else None


def has_content(metadata: object) -> bool:
    """Whether metadata says anything: not None, and not empty."""
    if metadata is None:
        return False
    return bool(metadata) if isinstance(metadata, (bytes, str, list, tuple, dict, set)) else True


def request_id(request: Any) -> int:
    """The id of a request, given as such or as an object."""
    found: int = request if isinstance(request, int) else request.request_id
    return found
