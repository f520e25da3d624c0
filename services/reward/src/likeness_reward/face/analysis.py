"""Frames to observations: detect, choose the face, align, embed."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from likeness_reward.domain import Face, FaceObservation, ScoreOptions, Verdict
from likeness_reward.face.alignment import AlignmentImpossible, align_face
from likeness_reward.face.detector import FaceDetector
from likeness_reward.face.recognizer import FaceRecognizer
from likeness_reward.face.scoring import cosine

MOST_FACES_COMPARED = 16
"""With `most_similar`, only so many of the largest faces of a frame are embedded."""


@dataclass(frozen=True)
class FrameAnalysis:
    """What was seen in one frame, and the embedding of the face used."""

    observation: FaceObservation
    embedding: NDArray[np.float32] | None
    """float32 [D], unit length; None unless the verdict is EMBEDDED."""
    crop: NDArray[np.uint8] | None
    """uint8 RGB [S, S, 3], the aligned face; None unless the verdict is EMBEDDED."""


@dataclass(frozen=True)
class _Candidate:
    frame_index: int
    face: Face
    crop: NDArray[np.uint8]


class FaceAnalyzer:
    """The face pipeline on one pair of networks. Holds no state between calls; threads may share it."""

    def __init__(self, detector: FaceDetector, recognizer: FaceRecognizer) -> None:
        self.detector = detector
        self.recognizer = recognizer
        self.observe_stage: Callable[[str, float], None] = lambda stage, seconds: None
        """Told the seconds of each stage of a batch: detect, align, recognize."""

    def analyze(
        self,
        frames: Sequence[NDArray[np.uint8]],
        options: ScoreOptions,
        identity: NDArray[np.float32] | None = None,
    ) -> list[FrameAnalysis]:
        """Returns one analysis per RGB frame uint8 [H, W, 3].

        `identity` [D] is needed when options.face_choice is "most_similar". Raises InferenceFailed.
        """
        compare = options.face_choice == "most_similar" and identity is not None
        began = time.perf_counter()
        detected = self.detector.detect(frames)
        detection_ended = time.perf_counter()
        candidates: list[_Candidate] = []
        verdicts: list[Verdict] = []
        for index, (frame, faces) in enumerate(zip(frames, detected, strict=True)):
            usable = [face for face in by_size(faces) if face.width >= options.min_face_pixels]
            wanted = usable[: MOST_FACES_COMPARED if compare else 1]
            aligned = self._align(index, frame, wanted)
            candidates += aligned
            verdicts.append(verdict_of(faces, usable, aligned))
        alignment_ended = time.perf_counter()
        chosen = self._choose(candidates, identity if compare else None)
        self.observe_stage("detect", detection_ended - began)
        self.observe_stage("align", alignment_ended - detection_ended)
        self.observe_stage("recognize", time.perf_counter() - alignment_ended)
        analyses = []
        for index, (verdict, faces) in enumerate(zip(verdicts, detected, strict=True)):
            candidate, embedding = chosen.get(index, (None, None))
            face, crop = (candidate.face, candidate.crop) if candidate is not None else (None, None)
            analyses.append(FrameAnalysis(FaceObservation(verdict, len(faces), face), embedding, crop))
        return analyses

    def _align(self, frame_index: int, frame: NDArray[np.uint8], faces: list[Face]) -> list[_Candidate]:
        candidates = []
        for face in faces:
            try:
                crop = align_face(frame, face.landmarks, self.recognizer.crop_size)
            except AlignmentImpossible:
                continue  # the verdict of the frame says so
            candidates.append(_Candidate(frame_index, face, crop))
        return candidates

    def _choose(
        self, candidates: list[_Candidate], identity: NDArray[np.float32] | None
    ) -> dict[int, tuple[_Candidate, NDArray[np.float32]]]:
        """Returns candidate and embedding by frame; of several the one most like `identity`, first on a tie."""
        if not candidates:
            return {}
        embeddings = self.recognizer.embed([candidate.crop for candidate in candidates])
        best: dict[int, tuple[float, int]] = {}
        for position, candidate in enumerate(candidates):
            similarity = cosine(embeddings[position], identity) if identity is not None else 0.0
            if candidate.frame_index not in best or similarity > best[candidate.frame_index][0]:
                best[candidate.frame_index] = (similarity, position)
        return {index: (candidates[position], embeddings[position]) for index, (_, position) in best.items()}


def by_size(faces: Sequence[Face]) -> list[Face]:
    """Returns the faces largest first; equal ones by confidence, then from left to right, then from top to bottom."""
    return sorted(faces, key=lambda face: (-face.area, -face.score, float(face.box[0]), float(face.box[1])))


def verdict_of(faces: Sequence[Face], usable: Sequence[Face], aligned: Sequence[_Candidate]) -> Verdict:
    """Returns the verdict on a frame from the faces found, those large enough and those that could be aligned."""
    if not faces:
        return Verdict.NO_FACE
    if not usable:
        return Verdict.FACE_TOO_SMALL
    return Verdict.EMBEDDED if aligned else Verdict.ALIGNMENT_FAILED
