from __future__ import annotations

import pytest

from tracekv.views.amounts import duration, size


@pytest.mark.parametrize(
    ("ns", "shown"),
    [
        (0, "0 ns"),
        (999, "999 ns"),
        (1_000, "1 µs"),
        (12_345, "12.3 µs"),
        (999_700, "1,000 µs"),
        (1_500_000, "1.5 ms"),
        (2e9, "2 s"),
        (4_321_000_000_000, "4,321 s"),
    ],
)
def test_a_duration_has_three_digits_and_no_exponent(ns: float, shown: str) -> None:
    assert duration(ns) == shown


@pytest.mark.parametrize(
    ("nbytes", "shown"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1 << 10, "1 KiB"),
        (1010 << 10, "1,010 KiB"),
        (int(999.7 * (1 << 20)), "1,000 MiB"),
        (12.34 * (1 << 30), "12.3 GiB"),
        (5 << 40, "5 TiB"),
    ],
)
def test_a_size_has_three_digits_and_no_exponent(nbytes: float, shown: str) -> None:
    assert size(nbytes) == shown
