"""Runs the command line: `python -m likeness_trainer`."""

from likeness_trainer.cli import main

main()
