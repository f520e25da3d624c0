"""Packs, good and bad: the message names the file, what was found and what is expected."""

import shutil
from pathlib import Path

import onnx
import pytest

from likeness_reward.embedded import EmbeddedScorer
from likeness_reward.errors import InvalidPack, ProviderUnavailable
from likeness_reward.pack.pack import load_pack


def test_roles_size_name_and_normalisation_are_read_from_the_pack(written_pack: Path) -> None:
    pack = load_pack(written_pack)
    assert (pack.name, pack.detector.path.name, pack.recognizer.path.name) == (
        "written",
        "detector.onnx",
        "recognizer.onnx",
    )
    assert pack.detector_config.size == (64, 64)
    assert (pack.recognizer_config.input_mean, pack.recognizer_config.input_std) == (127.5, 127.5)
    assert EmbeddedScorer(written_pack).embedding_length == 4


def test_without_pack_json_the_folder_names_the_pack_and_the_size_is_640(written_pack: Path) -> None:
    (written_pack / "pack.json").unlink()
    pack = load_pack(written_pack)
    assert (pack.name, pack.detector_config.size) == ("written", (640, 640))


def test_a_recognizer_that_normalises_itself_gets_raw_pixels(written_pack: Path, onnx_writer) -> None:
    onnx_writer.recognizer(written_pack / "recognizer.onnx", normalises=True)
    config = load_pack(written_pack).recognizer_config
    assert (config.input_mean, config.input_std) == (0.0, 1.0)


def test_the_fingerprint_depends_on_everything_that_decides_a_number(written_pack: Path, onnx_writer) -> None:
    first = load_pack(written_pack).fingerprint
    copy = written_pack.parent / "elsewhere"
    shutil.copytree(written_pack, copy)
    assert load_pack(copy).fingerprint == first
    others = {load_pack(written_pack, detector_size=(96, 64)).fingerprint}
    others.add(load_pack(written_pack, letterbox="full").fingerprint)
    onnx_writer.detector(copy / "detector.onnx", seed=1)
    others.add(load_pack(copy).fingerprint)
    onnx_writer.detector(copy / "detector.onnx")
    onnx_writer.recognizer(copy / "recognizer.onnx", length=8)
    others.add(load_pack(copy).fingerprint)
    assert len(others | {first}) == 5


def test_the_letterbox_is_that_of_the_call_then_of_pack_json_then_fit(written_pack: Path) -> None:
    assert load_pack(written_pack).detector_config.letterbox == "fit"
    (written_pack / "pack.json").write_text('{"detector_size": [64, 64], "letterbox": "full"}')
    assert load_pack(written_pack).detector_config.letterbox == "full"
    assert load_pack(written_pack, letterbox="fit").detector_config.letterbox == "fit"


def test_a_detector_of_one_size_has_the_full_letterbox_and_no_other(written_pack: Path) -> None:
    path = written_pack / "detector.onnx"
    model = onnx.load(path)
    for axis in model.graph.input[0].type.tensor_type.shape.dim[2:]:
        axis.dim_value = 64
    onnx.save(model, path)
    assert load_pack(written_pack).detector_config.letterbox == "full"
    with pytest.raises(InvalidPack, match="detector.onnx takes only 64x64; the letterbox fit needs other sizes"):
        load_pack(written_pack, letterbox="fit")


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda folder, writer: shutil.rmtree(folder), "no such folder"),
        (lambda folder, writer: [file.unlink() for file in folder.glob("*.onnx")], r"expected .* found pack.json"),
        (
            lambda folder, writer: (folder / "recognizer.onnx").unlink(),
            r"no recognizer: expected an ArcFace .*, found detector.onnx: input image \[1, 3, \?, \?\], 9 outputs",
        ),
        (lambda folder, writer: (folder / "detector.onnx").unlink(), r"no detector: .*found recognizer.onnx"),
        (
            lambda folder, writer: writer.recognizer(folder / "recognizer.onnx", side=100),
            r"no recognizer: .* found .*recognizer.onnx: input crop \[\?, 3, 100, 100\]",
        ),
        (
            lambda folder, writer: writer.recognizer(folder / "recognizer.onnx", side=128),
            r"recognizer.onnx: input is crop \[\?, 3, 128, 128\], expected sides of 112",
        ),
        (
            lambda folder, writer: writer.detector(folder / "detector.onnx", output_count=6),
            r"detector.onnx: found 6 outputs, expected 9 or 15",
        ),
        (
            lambda folder, writer: writer.detector(folder / "detector.onnx", box_columns=5),
            r"detector.onnx: output 3 is box_8 \[\?, 5\], expected \[anchors, 4\]",
        ),
        (
            lambda folder, writer: (folder / "detector.onnx").write_bytes(b"version https://git-lfs"),
            r"detector.onnx cannot be read as ONNX|detector.onnx is no network",
        ),
        (lambda folder, writer: (folder / "pack.json").write_text("{"), "pack.json"),
        (lambda folder, writer: (folder / "pack.json").write_text('{"letterbox": "square"}'), "letterbox"),
        (lambda folder, writer: (folder / "pack.json").write_text('{"detector_size": [60, 64]}'), "multiples of 32"),
    ],
)
def test_a_spoilt_pack_is_explained(written_pack: Path, onnx_writer, spoil, reason: str) -> None:
    spoil(written_pack, onnx_writer)
    with pytest.raises(InvalidPack, match=reason):
        load_pack(written_pack)


def test_cuda_is_never_silently_replaced(written_pack: Path) -> None:
    import onnxruntime

    if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        pytest.skip("this onnxruntime has CUDA")
    with pytest.raises(ProviderUnavailable, match="CUDAExecutionProvider is not available"):
        EmbeddedScorer(written_pack, provider="cuda")
