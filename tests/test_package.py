"""Promises of the package as a whole."""

from __future__ import annotations

import subprocess
import sys


def test_import_loads_neither_torch_nor_vllm() -> None:
    code = "import sys, inferscale; print([m for m in ('torch', 'vllm') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
