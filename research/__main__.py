"""Run ``python -m research``."""

from research.harness.command import main

main()
