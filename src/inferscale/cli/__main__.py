"""`python -m inferscale.cli`: the command line where its program is not on the path."""

from inferscale.cli import main

main(prog_name="inferscale")
