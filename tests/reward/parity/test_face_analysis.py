"""Boxes, landmarks, scores and embeddings are those of insightface.app.FaceAnalysis on the same pack."""

import shutil
import warnings
from pathlib import Path

import cv2
import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper

from likeness_reward.domain import ScoreOptions
from likeness_reward.embedded import EmbeddedScorer
from likeness_reward.face.alignment import CROP_LANDMARKS, align_face, estimate_similarity

insightface = pytest.importorskip("insightface", reason="insightface, the oracle of these tests, is not installed")

SIZES = [(640, 640), (320, 320), (640, 384)]
PACKS = ["real_pack", "toy_pack"]
WIDE, TALL = (832, 480), (480, 832)


def face_analysis(pack: Path, size: tuple[int, int]):
    from insightface.app import FaceAnalysis

    analysis = FaceAnalysis(
        name=str(pack), allowed_modules=["detection", "recognition"], providers=["CPUExecutionProvider"]
    )
    analysis.prepare(ctx_id=-1, det_thresh=0.5, det_size=size)
    return analysis


def reference_faces(analysis, frame_rgb: np.ndarray) -> list:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of the oracle's own scikit-image call
        return analysis.get(np.ascontiguousarray(frame_rgb[..., ::-1]))


@pytest.fixture(scope="session")
def group_photo() -> np.ndarray:
    """insightface's own picture of six people, RGB."""
    path = Path(insightface.__file__).parent / "data" / "images" / "t1.jpg"
    return np.ascontiguousarray(cv2.imread(str(path))[..., ::-1])


@pytest.fixture(scope="session")
def painted_frames() -> list[np.ndarray]:
    """Painted people, square and not, small and large."""
    painter = pytest.importorskip("likeness_toyworld.painter", reason="likeness-toyworld is not installed")
    frames = []
    for seed, size in ((1, 64), (2, 96), (3, 128)):
        frame = painter.render(painter.sample_identity(seed), 0.02, -0.01, 0.3, 0.3, size)
        frames += [frame, np.hstack([frame, frame[:, ::-1]]), np.ascontiguousarray(frame[: size * 3 // 4])]
    return frames


def assert_same_faces(scorer: EmbeddedScorer, analysis, frame: np.ndarray) -> int:
    """Compares all faces of a frame; returns how many there are."""
    expected = reference_faces(analysis, frame)
    (faces,) = scorer.analyzer.detector.first_pass([frame])
    assert len(faces) == len(expected)
    for face, reference in zip(faces, expected, strict=True):
        assert np.abs(face.box - reference.bbox).max() < 0.5
        assert np.abs(face.landmarks - reference.kps).max() < 0.5
        assert face.score == pytest.approx(float(reference.det_score), abs=1e-4)
        (embedding,) = scorer.analyzer.recognizer.embed([align_face(frame, face.landmarks)])
        assert float(embedding @ reference.normed_embedding) >= 0.9999
    return len(faces)


@pytest.mark.parametrize("pack_name", PACKS)
@pytest.mark.parametrize("size", SIZES)
def test_the_group_photo_gives_the_same_faces(
    pack_name: str, size: tuple[int, int], group_photo: np.ndarray, request: pytest.FixtureRequest
) -> None:
    pack = request.getfixturevalue(pack_name)
    scorer = EmbeddedScorer(pack, detector_size=size, letterbox="full")
    count = assert_same_faces(scorer, face_analysis(pack, size), group_photo)
    if pack_name == "real_pack":
        assert count == 6


@pytest.mark.parametrize("pack_name", PACKS)
def test_painted_people_give_the_same_faces(
    pack_name: str, painted_frames: list[np.ndarray], request: pytest.FixtureRequest
) -> None:
    pack = request.getfixturevalue(pack_name)
    default = EmbeddedScorer(pack).pack.detector_config.size
    size = default if pack_name == "toy_pack" else (128, 128)
    scorer = EmbeddedScorer(pack, detector_size=size, letterbox="full")
    analysis = face_analysis(pack, size)
    found = sum(assert_same_faces(scorer, analysis, frame) for frame in painted_frames)
    assert found >= len(painted_frames) - 1


def scenes(photo: np.ndarray, size: tuple[int, int], count: int) -> list[np.ndarray]:
    """Returns frames of (width, height): a painted person anywhere, also beyond the edges, or a part of a photo."""
    painter = pytest.importorskip("likeness_toyworld.painter", reason="likeness-toyworld is not installed")
    rng, frames = np.random.default_rng(0), []
    for index in range(count):
        frame = np.full((size[1], size[0], 3), rng.integers(20, 200, 3), np.uint8)
        if index % 2:
            picture = cv2.resize(
                photo, None, fx=(scale := rng.uniform(0.4, 0.9)), fy=scale, interpolation=cv2.INTER_AREA
            )
        else:
            side = int(rng.integers(80, 380))
            picture = painter.render(painter.sample_identity(index), 0.0, 0.0, 0.3, 0.3, side)
        corner = [int(rng.integers(-length // 4, max(whole - length * 3 // 4, 1 - length // 4)))
                  for length, whole in zip(picture.shape[1::-1], size, strict=True)]  # fmt: skip
        moved = np.array([[1, 0, corner[0]], [0, 1, corner[1]]], np.float32)
        cv2.warpAffine(picture, moved, size, dst=frame, borderMode=cv2.BORDER_TRANSPARENT)
        frames.append(frame)
    return frames


@pytest.mark.parametrize("size", [WIDE, TALL])
def test_leaving_out_the_empty_part_of_the_canvas_moves_no_face_by_a_pixel(
    real_pack: Path, group_photo: np.ndarray, size: tuple[int, int]
) -> None:
    fit, full = EmbeddedScorer(real_pack), EmbeddedScorer(real_pack, letterbox="full")
    assert fit.pack.detector_config.letterbox == "fit"
    embed, count = full.analyzer.recognizer.embed, 0
    for frame in scenes(group_photo, size, 24):
        (found,), (expected,) = (scorer.analyzer.detector.first_pass([frame]) for scorer in (fit, full))
        assert len(found) == len(expected)
        for face, reference in zip(found, expected, strict=True):
            assert np.abs(face.box - reference.box).max() < 1.0
            assert face.score == pytest.approx(reference.score, abs=0.01)
            one, other = embed([align_face(frame, each.landmarks) for each in (face, reference)])
            assert float(one @ other) >= 0.999
            count += 1
    assert count >= 30


def test_the_fitted_canvas_is_that_of_insightface_at_its_size(real_pack: Path, group_photo: np.ndarray) -> None:
    frame = np.full((480, 832, 3), 90, np.uint8)
    frame[20:297, 216:616] = cv2.resize(group_photo, (400, 277), interpolation=cv2.INTER_AREA)  # far from the cut
    scorer = EmbeddedScorer(real_pack)
    assert assert_same_faces(scorer, face_analysis(real_pack, (640, 384)), frame) == 6


def test_the_chosen_face_is_the_largest_one_of_insightface(real_pack: Path, group_photo: np.ndarray) -> None:
    scorer = EmbeddedScorer(real_pack)
    (chosen,) = scorer.analyzer.analyze([group_photo], ScoreOptions())
    faces = reference_faces(face_analysis(real_pack, (640, 640)), group_photo)
    largest = max(faces, key=lambda face: (face.bbox[2] - face.bbox[0]) * (face.bbox[3] - face.bbox[1]))
    assert chosen.observation.face is not None
    np.testing.assert_allclose(chosen.observation.face.box, largest.bbox, atol=0.5)
    assert float(chosen.embedding @ largest.normed_embedding) >= 0.9999


def test_swapped_colours_would_be_noticed(real_pack: Path, group_photo: np.ndarray) -> None:
    scorer = EmbeddedScorer(real_pack)
    face = reference_faces(face_analysis(real_pack, (640, 640)), group_photo)[0]
    (swapped,) = scorer.analyzer.recognizer.embed([align_face(group_photo[..., ::-1].copy(), face.kps)])
    assert float(swapped @ face.normed_embedding) < 0.999


def test_a_face_that_fills_the_frame_is_found_by_the_second_look(real_pack: Path, group_photo: np.ndarray) -> None:
    scorer = EmbeddedScorer(real_pack)
    face = scorer.analyzer.detector.first_pass([group_photo])[0][0]
    left, top, right, bottom = face.box.round().astype(int)
    close_up = np.ascontiguousarray(group_photo[top:bottom, left:right])
    assert scorer.analyzer.detector.first_pass([close_up]) == [[]]
    (found,) = scorer.analyzer.detector.detect([close_up])
    assert len(found) == 1
    assert np.abs(found[0].landmarks + [left, top] - face.landmarks).max() < 0.1 * face.width


def batched_copy(pack: Path, folder: Path) -> Path:
    """Gives the detector a true batch axis: Transpose [0, 2, 3, 1], Reshape [0, -1, k], outputs of rank 3."""
    shutil.copytree(pack, folder)
    path = next(file for file in sorted(folder.glob("*.onnx")) if len(onnx.load(file).graph.output) == 9)
    path.chmod(0o644)
    model = onnx.load(path)
    graph = model.graph
    graph.input[0].type.tensor_type.shape.dim[0].dim_param = "batch"
    producer = {name: node for node in graph.node for name in node.output}
    for output in graph.output:
        node = producer[output.name]
        reshape = producer[node.input[0]] if node.op_type == "Sigmoid" else node
        producer[reshape.input[0]].attribute[0].ints[:] = [0, 2, 3, 1]
        columns = output.type.tensor_type.shape.dim[1].dim_value
        target = numpy_helper.from_array(np.array([0, -1, columns], np.int64), f"{reshape.name}_batched")
        graph.initializer.append(target)
        reshape.input[1] = target.name
        output.CopyFrom(onnx.helper.make_tensor_value_info(output.name, TensorProto.FLOAT, ["batch", None, columns]))
    folder.chmod(0o755)
    path.unlink()
    onnx.save(model, str(path))
    return folder


def test_a_detector_with_a_batch_axis_gives_the_same_numbers(
    real_pack: Path, group_photo: np.ndarray, tmp_path: Path
) -> None:
    one_by_one = EmbeddedScorer(real_pack, detector_size=(320, 320))
    batched = EmbeddedScorer(batched_copy(real_pack, tmp_path / "batched"), detector_size=(320, 320))
    assert batched.analyzer.detector._batched
    assert not one_by_one.analyzer.detector._batched
    frames = [group_photo, np.ascontiguousarray(group_photo[:, ::-1]), np.zeros_like(group_photo)]
    expected, found = one_by_one.analyzer.detector.first_pass(frames), batched.analyzer.detector.first_pass(frames)
    assert [len(faces) for faces in expected] == [6, 6, 0]
    for expected_faces, found_faces in zip(expected, found, strict=True):
        for reference, face in zip(expected_faces, found_faces, strict=True):
            np.testing.assert_allclose(face.box, reference.box, atol=1e-3)
            np.testing.assert_allclose(face.landmarks, reference.landmarks, atol=1e-3)


def test_the_alignment_is_that_of_scikit_image() -> None:
    from insightface.utils.face_align import estimate_norm

    rng = np.random.default_rng(0)
    for _ in range(50):
        landmarks = (CROP_LANDMARKS * rng.uniform(0.2, 9) + rng.normal(0, 12, (5, 2))).astype(np.float32)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            expected = estimate_norm(landmarks)
        np.testing.assert_allclose(
            estimate_similarity(landmarks), expected, atol=1e-4
        )  # scikit-image computes in float32
