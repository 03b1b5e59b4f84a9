"""What every record is."""

from __future__ import annotations

import msgspec


class Record(msgspec.Struct, array_like=True, gc=False):
    """Any record."""
