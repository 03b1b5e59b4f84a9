"""The ``tracekv`` command."""

from __future__ import annotations

import sys


def main() -> None:
    """Entry point; says which extra is missing where the command line's libraries aren't installed."""
    try:
        from tracekv.cli.app import app

        app()  # which imports its commands
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich", "click", "numpy"):
            raise
        sys.exit(f"tracekv: the command line needs {error.name}. Install it with: pip install 'tracekv[cli]'")
