"""The tiny face pack as insightface.app.FaceAnalysis runs it: people no training has seen, and pictures without one."""

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from likeness_toyworld.assets import face_pack_path
from likeness_toyworld.face_pack import pictures
from likeness_toyworld.face_pack.crops import TEMPLATE, align, similarity
from likeness_toyworld.painter import HELD_OUT_SEED, blend, paint_clip, render, sample_identity, sample_motion

PEOPLE = range(HELD_OUT_SEED + 900_000, HELD_OUT_SEED + 900_040)

pytest.importorskip("insightface", reason="insightface, which runs the pack in these tests, is not installed")


@pytest.fixture(scope="module")
def analysis() -> Any:
    from insightface.app import FaceAnalysis

    size = json.loads((Path(face_pack_path()) / "pack.json").read_text())["detector_size"]
    faces = FaceAnalysis(
        name=face_pack_path(), allowed_modules=["detection", "recognition"], providers=["CPUExecutionProvider"]
    )
    faces.prepare(ctx_id=-1, det_thresh=0.5, det_size=tuple(size))
    return faces


def faces_of(analysis: Any, frame_rgb: np.ndarray) -> list[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of InsightFace's own scikit-image call
        return analysis.get(np.ascontiguousarray(frame_rgb[..., ::-1]))


@pytest.fixture(scope="module")
def gallery(analysis: Any) -> np.ndarray:
    """Unit embeddings float32 [people, 2, 128] of the first and the last frame of each person's clip."""
    embeddings = []
    for seed in PEOPLE:
        clip, _ = paint_clip(sample_identity(seed), sample_motion(seed))
        found = [faces_of(analysis, clip[index]) for index in (0, -1)]
        assert [len(faces) for faces in found] == [1, 1]
        embeddings.append([faces[0].normed_embedding for faces in found])
    return np.array(embeddings)


def test_faces_lie_where_they_were_painted(analysis: Any) -> None:
    for seed in list(PEOPLE)[:10]:
        clip, truth = paint_clip(sample_identity(seed), sample_motion(seed))
        (face,) = faces_of(analysis, clip[4])
        width = truth.boxes[4, 2] - truth.boxes[4, 0]
        assert np.abs(face.kps - truth.landmarks[4]).max() < 0.1 * width
        assert np.abs(face.bbox - truth.boxes[4]).max() < 0.15 * width


def test_two_frames_of_a_person_are_closer_than_two_people(gallery: np.ndarray) -> None:
    cosines = gallery[:, 0] @ gallery[:, 1].T
    own = np.diag(cosines)
    others = cosines[~np.eye(len(cosines), dtype=bool)]
    correctly_ordered = float((own[:, None] > others[None]).mean())  # the area under the verification curve
    assert correctly_ordered > 0.999
    assert own.mean() > 0.9
    assert abs(others.mean()) < 0.15


def test_similarity_falls_steadily_as_a_face_turns_into_another(analysis: Any) -> None:
    amounts = np.linspace(0, 1, 6)
    curves = []
    for seed in list(PEOPLE)[:12]:
        person, other = sample_identity(seed), sample_identity(seed + 50)
        frames = [render(blend(person, other, float(amount))) for amount in amounts]
        embeddings = [faces_of(analysis, frame)[0].normed_embedding for frame in frames]
        curves.append([float(embedding @ embeddings[0]) for embedding in embeddings])
    mean = np.mean(curves, axis=0)
    assert np.all(np.diff(mean) < -0.03), mean
    assert mean[1] > 0.7


def test_no_face_is_found_where_none_is(analysis: Any) -> None:
    rng = np.random.default_rng(0)
    noise = rng.integers(0, 256, (64, 64, 3)).astype(np.uint8)
    plain = np.full((64, 64, 3), 128, np.uint8)
    backgrounds = [pictures.faceless_background(64, 64, rng) for _ in range(60)]
    assert [len(faces_of(analysis, frame)) for frame in (noise, plain)] == [0, 0]
    assert sum(len(faces_of(analysis, frame)) for frame in backgrounds) <= 1


def test_a_face_without_eyes_and_mouth_is_no_face(analysis: Any) -> None:
    rng = np.random.default_rng(1)
    found = 0
    for seed in list(PEOPLE)[:20]:
        clip, truth = paint_clip(sample_identity(seed), sample_motion(seed))
        blank = pictures.cover(clip[0], truth.landmarks[0], [0, 1, 2, 3], rng)
        found += len(faces_of(analysis, blank))
    assert found <= 2


def test_alignment_equals_the_one_of_insightface() -> None:
    from insightface.utils.face_align import estimate_norm, norm_crop

    clip, truth = paint_clip(sample_identity(3), sample_motion(3), size=128)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        assert similarity(truth.landmarks[0]) == pytest.approx(estimate_norm(truth.landmarks[0], 112), abs=1e-3)
        theirs = norm_crop(clip[0], truth.landmarks[0])
    assert np.abs(align(clip[0], truth.landmarks[0]).astype(int) - theirs).max() <= 1
    assert similarity(TEMPLATE) == pytest.approx(np.eye(2, 3), abs=1e-6)


def test_mirrored_people_keep_their_identity(analysis: Any) -> None:
    cosines = []
    for seed in list(PEOPLE)[:10]:
        clip, _ = paint_clip(sample_identity(seed), sample_motion(seed))
        straight, mirrored = (faces_of(analysis, frame) for frame in (clip[0], clip[0][:, ::-1]))
        cosines.append(float(straight[0].normed_embedding @ mirrored[0].normed_embedding))
    assert np.mean(cosines) > 0.8
