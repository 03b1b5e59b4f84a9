"""Write the dashboards, the rules and their page; with ``--runbooks URL`` print the rules for that address."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from dashboards import rules
from dashboards.board import as_json
from dashboards.boards import BOARDS
from dashboards.page import page

ROOT = Path(__file__).resolve().parents[1]


def files() -> dict[Path, str]:
    """Everything that is generated, by its path below the checkout."""
    boards = {Path("dashboards/grafana") / f"{board.uid}.json": as_json(board) for board in BOARDS}
    return {
        **boards,
        Path("dashboards/prometheus/tracekv.rules.yml"): rules.as_yaml(),
        Path("docs/dashboards.md"): page(),
    }


def main() -> None:
    """Write what has changed, and name it."""
    parser = argparse.ArgumentParser(prog="python -m dashboards", description=__doc__)
    parser.add_argument("--runbooks", metavar="URL", help="print the rules with runbooks below this address instead")
    runbooks = parser.parse_args().runbooks
    if runbooks is not None:
        sys.stdout.write(rules.as_yaml(runbooks.rstrip("/") + "/"))
        return
    for path, text in files().items():
        target = ROOT / path
        if not target.exists() or target.read_text(encoding="utf-8") != text:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
            sys.stdout.write(f"{path}\n")


if __name__ == "__main__":
    main()
