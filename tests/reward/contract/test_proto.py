"""The contract itself."""

import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[3]


def test_the_contract_is_clean_under_buf() -> None:
    lint = subprocess.run(
        [sys.executable, str(REPOSITORY / "proto" / "lint.py")], capture_output=True, text=True, timeout=60
    )
    assert lint.returncode == 0, lint.stdout + lint.stderr
