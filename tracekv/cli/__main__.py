"""``python -m tracekv.cli``."""

from tracekv.cli import main

main()
