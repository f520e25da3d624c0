"""Lints the contract, and with --against REF checks that it breaks nothing since that commit.

buf itself would fetch google/rpc/status.proto from its registry; this puts the copy of the installed
googleapis-common-protos beside the contract in a temporary workspace instead, so that nothing is fetched.

    python proto/lint.py [--against HEAD]
"""

import argparse
import shutil
import subprocess
import sys
import tarfile
import tempfile
from importlib import resources
from io import BytesIO
from pathlib import Path

PROTO_ROOT = Path(__file__).resolve().parent
GOOGLE_MODULE = "  - path: googleapis\n    lint:\n      ignore: [googleapis]\n"


def write_workspace(contract: Path, workspace: Path) -> None:
    """Lays out contract/ and googleapis/ as the two modules of one buf workspace."""
    shutil.copytree(contract / "likeness", workspace / "contract" / "likeness")
    status = workspace / "googleapis" / "google" / "rpc" / "status.proto"
    status.parent.mkdir(parents=True)
    status.write_text((resources.files("google.rpc") / "status.proto").read_text())
    settings = (PROTO_ROOT / "buf.yaml").read_text()
    (workspace / "buf.yaml").write_text(settings.replace("  - path: .\n", f"  - path: contract\n{GOOGLE_MODULE}"))


def buf() -> str:
    """Path of the buf program: beside this Python, else on the PATH."""
    beside = Path(sys.executable).parent / "buf"
    return str(beside) if beside.exists() else "buf"


def main() -> int:
    """Exit code: 0 when the contract is clean, else that of buf."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", metavar="REF", help="a git commit whose contract must stay compatible")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        workspace = Path(folder) / "now"
        write_workspace(PROTO_ROOT, workspace)
        code = subprocess.run([buf(), "lint"], cwd=workspace).returncode
        if code == 0 and arguments.against is not None:
            archive = subprocess.run(
                ["git", "archive", arguments.against, "likeness"], cwd=PROTO_ROOT, stdout=subprocess.PIPE, check=True
            )
            before = Path(folder) / "before"
            with tarfile.open(fileobj=BytesIO(archive.stdout)) as files:
                files.extractall(before / "source", filter="data")
            write_workspace(before / "source", before / "workspace")
            code = subprocess.run([buf(), "breaking", "--against", str(before / "workspace")], cwd=workspace).returncode
    return code


if __name__ == "__main__":
    sys.exit(main())
