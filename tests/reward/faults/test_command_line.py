"""The command line, run in this process: what it prints, and how it fails."""

import json
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest

from likeness_reward import cli
from likeness_reward.domain import IdentityTemplate
from likeness_reward.images import encode_png


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Runs the command line: returns (exit code, stdout, stderr)."""

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["likeness-reward", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        printed = capsys.readouterr()
        return ended.value.code or 0, printed.out, printed.err

    return call


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    path = tmp_path / "anna.png"
    path.write_bytes(encode_png(np.full((64, 64, 3), 220, np.uint8)))
    return path


@pytest.fixture
def clip(tmp_path: Path) -> Path:
    """Two bright frames, in which the written detector sees a face, and one dark one."""
    folder = tmp_path / "clip"
    folder.mkdir()
    for index, level in enumerate((220, 220, 0)):
        (folder / f"{index}.png").write_bytes(encode_png(np.full((64, 64, 3), level, np.uint8)))
    return folder


def test_pack_check_names_everything(run, written_pack: Path) -> None:
    code, out, _ = run("pack", "check", written_pack)
    assert code == 0
    for words in (
        "detector.onnx: detector",
        "image [1, 3, ?, ?]",
        "recognizer.onnx: recognizer",
        "detector size     64x64",
        "embedding length  4",
        "fingerprint       ",
        "smoke inference   ok",
    ):
        assert words in out


def test_pack_check_of_a_spoilt_pack_names_file_found_and_expected(run, written_pack: Path, onnx_writer) -> None:
    onnx_writer.detector(written_pack / "detector.onnx", box_columns=5)
    code, _, err = run("pack", "check", written_pack)
    assert (code, "detector.onnx: output 3 is box_8 [?, 5], expected [anchors, 4]" in err) == (4, True)
    (written_pack / "detector.onnx").unlink()
    code, _, err = run("pack", "check", written_pack)
    assert code == 4
    assert "no detector: expected an SCRFD" in err
    assert "found recognizer.onnx" in err


def test_score_in_this_process_and_by_a_server_agree(run, serve, written_pack: Path, photo: Path, clip: Path) -> None:
    from likeness_reward.embedded import EmbeddedScorer

    code, out, _ = run("score", clip, "--identity", photo, "--pack", written_pack, "--json", "--per-frame")
    document = json.loads(out)
    assert code == 0
    assert document["reward"] == pytest.approx(2 / 3)
    assert (document["frame_count"], document["embedded_frame_count"]) == (3, 2)
    assert [frame["verdict"] for frame in document["frames"]] == ["embedded", "embedded", "no_face"]
    endpoint = serve(EmbeddedScorer(written_pack)).endpoint
    _, out, _ = run("score", clip, "--identity", photo, "--endpoint", endpoint, "--json")
    remote = json.loads(out)
    assert remote["similarities"] == pytest.approx(document["similarities"])
    assert remote["model_fingerprint"] == document["model_fingerprint"]


def test_score_prints_a_line_for_people_and_a_table_on_demand(run, written_pack: Path, photo: Path, clip: Path) -> None:
    code, out, _ = run("score", clip, "--identity", photo, "--pack", written_pack, "--per-frame")
    lines = out.splitlines()
    assert code == 0
    assert lines[0].split()[:2] == ["0.6667", str(clip)]
    assert "face in 2 of 3 frames" in lines[0]
    assert lines[-1].split() == ["2", "-", "0", "-", "no_face"]


def test_embed_writes_a_template_that_score_takes(run, written_pack: Path, photo: Path, clip: Path) -> None:
    template = photo.parent / "anna.json"
    code, out, _ = run("embed", photo, photo, "-o", template, "--pack", written_pack)
    assert code == 0
    assert "2 of 2 images" in out
    assert IdentityTemplate.load(template).image_count == 2
    code, out, _ = run("score", clip, "--identity", template, "--pack", written_pack, "--no-face-value", "-1")
    assert (code, out.split()[0]) == (0, "0.3333")


def test_an_unreadable_video_is_named_and_the_others_are_scored(
    run, written_pack: Path, photo: Path, clip: Path
) -> None:
    broken = photo.parent / "broken.mp4"
    broken.write_bytes(b"\0" * 5000)
    code, out, err = run("score", broken, clip, "--identity", photo, "--pack", written_pack)
    assert code == 3
    assert f"error: {broken} cannot be opened as a video (5000 bytes)" in err
    assert str(clip) in out


def test_a_video_cut_off_in_its_header_is_unreadable(run, written_pack: Path, photo: Path) -> None:
    path = photo.parent / "clip.mp4"
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter_fourcc(*"mp4v"), 16, (64, 64))
    for _ in range(8):
        writer.write(np.full((64, 64, 3), 220, np.uint8))
    writer.release()
    code, out, _ = run("score", path, "--identity", photo, "--pack", written_pack)
    assert (code, "face in 8 of 8 frames" in out) == (0, True)
    path.write_bytes(path.read_bytes()[:600])
    code, _, err = run("score", path, "--identity", photo, "--pack", written_pack)
    assert (code, "clip.mp4" in err) == (3, True)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["score", "x.mp4", "--identity", "a.png"], 2, "exactly one of --endpoint"),
        (["score", "x.mp4", "--identity", "a.png", "--pack", "missing"], 4, "pack missing: no such folder"),
        (["serve"], 2, "pack"),
        (["serve", "--pack", "missing"], 4, "pack missing: no such folder"),
        (["serve", "--pack", "missing", "--port", "99999"], 2, "port is 99999"),
        (["pack", "check", "missing", "--detector-size", "640"], 2, "no WIDTHxHEIGHT"),
    ],
)
def test_wrong_usage_and_missing_packs_have_their_exit_codes(run, arguments: list[str], code: int, words: str) -> None:
    found, _, err = run(*arguments)
    assert (found, words in err) == (code, True), err


def test_a_missing_identity_is_named(run, written_pack: Path, clip: Path) -> None:
    code, _, err = run("score", clip, "--identity", "nobody.png", "--pack", written_pack)
    assert (code, "nobody.png: no such file" in err) == (3, True)


def test_an_identity_without_a_face_is_an_error(run, written_pack: Path, clip: Path) -> None:
    dark = clip / "2.png"
    code, _, err = run("score", clip, "--identity", dark, "--pack", written_pack)
    assert (code, "no usable face in any of 1 images: no_face" in err) == (1, True)


def test_help_teaches_by_example(run) -> None:
    code, out, _ = run("score", "--help")
    assert code == 0
    assert "likeness-reward score sample.mp4 --identity anna.jpg" in out


def test_a_missing_extra_names_the_command_that_installs_it(
    run, monkeypatch: pytest.MonkeyPatch, written_pack: Path
) -> None:
    from likeness_reward import extras

    monkeypatch.setattr(extras, "EMBEDDED_MODULES", ("onnxruntime", "a_module_that_is_not_there"))
    code, _, err = run("pack", "check", written_pack)
    assert code == 1
    assert "needs a_module_that_is_not_there: pip install 'likeness-reward[embedded]'" in err


def unboxed(text: str) -> str:
    """Returns a usage error as one line, without the box that the terminal draws around it."""
    return " ".join(text.replace("\u2502", " ").split())


def bright_clip(folder: Path, name: str, levels: tuple[int, ...]) -> Path:
    clip = folder / name
    clip.mkdir()
    for index, level in enumerate(levels):
        (clip / f"{index}.png").write_bytes(encode_png(np.full((64, 64, 3), level, np.uint8)))
    return clip


def test_several_videos_are_scored_at_once_and_told_in_the_order_given(
    run, serve, written_pack: Path, photo: Path, tmp_path: Path
) -> None:
    from likeness_reward.embedded import EmbeddedScorer

    clips = [bright_clip(tmp_path, f"clip{count}", (220,) * count + (0,) * (6 - count)) for count in (5, 1, 3, 6, 2)]
    missing = tmp_path / "missing.mp4"
    arguments = ["score", clips[0], clips[1], missing, *clips[2:], "--identity", photo, "--jsonl"]
    endpoint = serve(EmbeddedScorer(written_pack)).endpoint
    for where in (["--pack", written_pack, "--concurrency", 3], ["--endpoint", endpoint]):
        code, out, err = run(*arguments, *where)
        documents = [json.loads(line) for line in out.splitlines()]
        assert code == 3
        assert [document["video"] for document in documents] == [
            str(path) for path in [*clips[:2], missing, *clips[2:]]
        ]
        found = [document["embedded_frame_count"] for document in documents if "reward" in document]
        assert found == [5, 1, 3, 6, 2]
        assert documents[2]["error"] == {"reason": "UNREADABLE_VIDEO", "message": f"{missing}: no such file"}
        assert f"error: {missing}: no such file" in err


def test_json_is_one_object_for_one_video_and_a_list_for_several(run, written_pack: Path, photo: Path, clip: Path):
    arguments = ["--identity", photo, "--pack", written_pack, "--json"]
    one = json.loads(run("score", clip, *arguments)[1])
    assert json.loads(run("score", clip, clip, *arguments)[1]) == [one, one]
    code, _, err = run("score", clip, *arguments, "--jsonl")
    assert (code, "not both" in err) == (2, True)


def test_a_plot_and_annotated_copies_are_written(run, written_pack: Path, photo: Path, clip: Path, tmp_path: Path):
    from likeness_reward.videos import read_video

    plot, copy = tmp_path / "plot.png", tmp_path / "seen.mp4"
    code, _, err = run("score", clip, "--identity", photo, "--pack", written_pack, "--plot", plot, "--annotate", copy)
    assert code == 0, err
    assert cv2.imread(str(plot)).shape[1] > 600
    seen = read_video(copy)
    assert seen.shape == (3, 64, 64, 3)
    colourfulness = np.ptp(seen.astype(int), axis=-1).max(axis=(1, 2))
    assert (colourfulness[:2] > 8).all()  # the box; 4:2:0 pales its thin lines, on grey frames
    assert colourfulness[2] < 5  # no face, no box
    assert not list(tmp_path.glob(".*partial*"))
    folder = tmp_path / "all"
    other = bright_clip(tmp_path, "other", (220, 220))
    assert run("score", clip, other, "--identity", photo, "--pack", written_pack, "--annotate", folder)[0] == 0
    assert sorted(path.name for path in folder.iterdir()) == ["clip.mp4", "other.mp4"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--plot", "plot.txt"], "must end in .png, .svg, .pdf"),
        (["--plot", "nowhere/plot.png"], "there is no folder nowhere"),
        (["--annotate", "copy.avi"], "must end in .mp4"),
        (["--motion-weight", "1"], "--motion-weight needs --motion-reference"),
        (["--concurrency", "0"], "concurrency"),
    ],
)
def test_wrong_outputs_are_refused_before_anything_is_scored(
    run, written_pack: Path, photo: Path, clip: Path, arguments: list[str], words: str
) -> None:
    code, out, err = run("score", clip, "--identity", photo, "--pack", written_pack, *arguments)
    assert (code, out, words in unboxed(err)) == (2, "", True), err


def test_an_annotated_copy_never_replaces_its_video(run, written_pack: Path, photo: Path, tmp_path: Path) -> None:
    path = tmp_path / "clip.mp4"
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter_fourcc(*"mp4v"), 16, (64, 64))
    writer.write(np.full((64, 64, 3), 220, np.uint8))
    writer.release()
    before = path.read_bytes()
    code, _, err = run("score", path, "--identity", photo, "--pack", written_pack, "--annotate", path)
    assert (code, "would replace" in unboxed(err)) == (2, True)
    assert path.read_bytes() == before


def test_motion_is_compared_with_a_reference_video(run, written_pack: Path, photo: Path, tmp_path: Path) -> None:
    moving, still = bright_clip(tmp_path, "moving", (220, 220)), bright_clip(tmp_path, "still", (220, 220))
    half = np.full((64, 64, 3), 220, np.uint8)
    half[:, 32:] = 160
    (moving / "1.png").write_bytes(encode_png(half))
    arguments = ["--identity", photo, "--pack", written_pack, "--motion-reference", moving, "--motion-weight", 0.5]
    code, out, _ = run("score", still, moving, *arguments, "--json")
    frozen, reference = json.loads(out)
    parts = {part["name"]: part for part in frozen["components"]}
    assert code == 0
    assert parts["motion"]["weight"] == 0.5
    assert parts["motion"]["value"] < 0.1
    assert {part["name"]: part["value"] for part in reference["components"]}["motion"] == pytest.approx(1.0)
    assert frozen["motion"] == {"scene": 0.0, "face": 0.0}
