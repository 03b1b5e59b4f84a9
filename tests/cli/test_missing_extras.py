"""Where a library of the command line isn't installed, it says which extra brings it."""

from __future__ import annotations

import subprocess
import sys

import pytest

_WITHOUT = """
import sys

class Missing:
    def find_spec(self, name, *_):
        if name == {name!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
sys.argv = ["tracekv", *{arguments!r}]
from tracekv.cli import main
main()
"""


@pytest.mark.parametrize(
    ("name", "arguments"), [("typer", ["--help"]), ("rich", ["--help"]), ("rich", ["explain", "--help"])]
)
def test_the_extra_is_named(name: str, arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT.format(name=name, arguments=arguments)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert f"tracekv: the command line needs {name}" in done.stderr
    assert "pip install 'tracekv[cli]'" in done.stderr
    assert "Traceback" not in done.stderr
