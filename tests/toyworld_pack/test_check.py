"""`python -m likeness_toyworld.check`: its numbers on painted frames, and what it says about missing packs."""

import json
from pathlib import Path

import pytest

from likeness_toyworld import check

pytest.importorskip("insightface", reason="insightface, which measures the packs, is not installed")


def test_painted_frames_show_their_person(capsys: pytest.CaptureFixture[str]) -> None:
    pack = str(check.face_pack_path())
    assert check.main(["--painted-only", "--samples", "6", "--pack", pack, "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["num_frames"] == 6 * 8
    assert row["found"] >= 0.99
    assert row["cosine"] > 0.9
    assert abs(row["other_person"]) < 0.3


def test_a_folder_without_networks_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check.main(["--pack", str(tmp_path)]) == 2
    assert str(tmp_path) in "".join(capsys.readouterr().err.split())
    with pytest.raises(SystemExit):
        check.main(["--samples", "1"])


def test_the_shipped_model_keeps_faces_but_not_their_owner() -> None:
    rows = check.check([check.Pack(Path(check.face_pack_path()))], people=8, with_model=True, report=lambda text: None)
    found = {row.frames: row.found for row in rows}
    cosine = {row.frames: row.cosine for row in rows}
    assert found["painted"] >= 0.99
    assert found["reconstructed"] >= 0.95
    assert found["sampled"] >= 0.85
    assert cosine["sampled"] < cosine["reconstructed"] - 0.1
