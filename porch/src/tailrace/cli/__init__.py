"""The command line: `tailrace`, or `python -m tailrace.cli`."""

from tailrace.cli.command_line import main as main
