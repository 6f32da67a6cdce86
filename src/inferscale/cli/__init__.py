"""The command line: `inferscale COMMAND`. Data goes to stdout, everything else to stderr.

`main` is the entry point; one file per group of commands. Engine and torch are imported only by
the commands that need them, so `--help` is instant.
"""

from inferscale.cli.app import main

__all__ = ["main"]
