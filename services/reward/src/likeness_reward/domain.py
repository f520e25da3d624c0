"""The words that client, server and embedded scorer share: identities, options, verdicts and rewards."""

import json
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from likeness_reward.errors import InvalidTemplate

TEMPLATE_FORMAT = "likeness-identity-template/1"
IDENTITY_COMPONENT = "identity"
COVERAGE_COMPONENT = "coverage"
MOTION_COMPONENT = "motion"
COMPONENT_NAMES = (IDENTITY_COMPONENT, COVERAGE_COMPONENT, MOTION_COMPONENT)

Pooling = Literal["mean", "quality_weighted"]
GradientEncoding = Literal["float16", "float32"]


def parse_size(text: str) -> tuple[int, int]:
    """Returns (width, height) of "640x384". Raises ValueError."""
    width, _, height = text.lower().partition("x")
    if not (width.isdigit() and height.isdigit()):
        raise ValueError(f"{text!r} is no WIDTHxHEIGHT, for example 640x640")
    return int(width), int(height)


class Verdict(Enum):
    """What became of one image or frame."""

    EMBEDDED = "embedded"
    NO_FACE = "no_face"
    FACE_TOO_SMALL = "face_too_small"
    ALIGNMENT_FAILED = "alignment_failed"


class ScoreOptions(BaseModel):
    """How frames become a reward."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    aggregation: Literal["mean", "min"] = "mean"
    """How the similarities of the frames become one number."""
    no_face_value: float = Field(default=0.0, ge=-1.0, le=1.0)
    """Similarity that a frame without a usable face counts with."""
    min_face_pixels: int = Field(default=16, ge=1, le=4096)
    """Smallest face width used, in pixels of the frame as sent."""
    face_choice: Literal["largest", "most_similar"] = "largest"
    """Which face counts when a frame shows several; `largest` cannot be gamed by the identity."""
    identity_weight: float = 1.0
    """Weight of the mean (or least) similarity in the reward."""
    coverage_weight: float = 0.0
    """Weight of the share of frames with an embedded face in the reward."""
    motion_weight: float = 0.0
    """Weight of the motion, compared with a reference motion, in the reward; a weight needs a reference."""
    include_frames: bool = True
    """Whether the reward lists every frame."""
    include_crop_gradients: bool = False
    """Whether the reward comes with its gradients by the aligned crops; see CropGradient."""
    gradient_encoding: GradientEncoding = "float16"
    """How their values cross the wire; in this process they are float32."""


@dataclass(frozen=True)
class IdentityTemplate:
    """One person as a recognizer sees them: the mean of the unit embeddings of their images, NOT re-normalised."""

    embedding: NDArray[np.float32]
    """float32 [D]; D is the recognizer's."""
    model_fingerprint: str
    """Fingerprint of the models that made it; other models cannot read it."""
    image_count: int
    """Images pooled into it."""

    def save(self, path: Path | str) -> None:
        """Writes the template as a small JSON file; float32 values survive exactly."""
        document = {
            "format": TEMPLATE_FORMAT,
            "model_fingerprint": self.model_fingerprint,
            "image_count": self.image_count,
            "embedding": [float(value) for value in self.embedding],
        }
        Path(path).write_text(json.dumps(document) + "\n", encoding="utf-8")

    @staticmethod
    def load(path: Path | str) -> "IdentityTemplate":
        """Returns the template that `save` wrote. Raises InvalidTemplate naming the file and what is wrong."""
        try:
            document = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise InvalidTemplate(f"cannot read identity template {path}: {error}", path=str(path)) from error
        if not isinstance(document, dict) or document.get("format") != TEMPLATE_FORMAT:
            raise InvalidTemplate(f"{path} is no identity template: no format {TEMPLATE_FORMAT!r}", path=str(path))
        try:
            embedding = np.asarray(document["embedding"], np.float32)
            template = IdentityTemplate(embedding, str(document["model_fingerprint"]), int(document["image_count"]))
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidTemplate(f"identity template {path} is damaged: {error!r}", path=str(path)) from error
        if embedding.ndim != 1 or embedding.size == 0 or not np.isfinite(embedding).all():
            found = f"shape {list(embedding.shape)}"
            raise InvalidTemplate(f"identity template {path}: embedding is no list of finite numbers ({found})")
        return template


@dataclass(frozen=True)
class Face:
    """One detected face, in pixels of the frame as sent."""

    box: NDArray[np.float32]
    """float32 [4]: x_min, y_min, x_max, y_max."""
    score: float
    """Detector confidence, 0 to 1."""
    landmarks: NDArray[np.float32]
    """float32 [5, 2], (x, y): eyes, nose, mouth corners."""

    @property
    def width(self) -> float:
        """Width of the box in pixels."""
        return float(self.box[2] - self.box[0])

    @property
    def area(self) -> float:
        """Area of the box in square pixels."""
        return float((self.box[2] - self.box[0]) * (self.box[3] - self.box[1]))


@dataclass(frozen=True)
class FaceObservation:
    """What was seen in one image or frame."""

    verdict: Verdict
    face_count: int
    """Faces above the detection threshold."""
    face: Face | None
    """The face used; None unless the verdict is EMBEDDED."""


@dataclass(frozen=True)
class Thumbnails:
    """What is kept of a frame to measure motion: small grey pictures of zero mean and at most unit length."""

    scene: NDArray[np.float32]
    """float32 [S * S], the whole frame."""
    face: NDArray[np.float32] | None
    """float32 [F * F], the aligned face; None without one."""


@dataclass(frozen=True)
class VideoMotion:
    """How much a video moves, from 0 for a still picture to 1; see face/motion.py."""

    scene: float
    """Motion of the whole frame."""
    face: float | None
    """Motion of the aligned face; None without two consecutive frames that show one."""


@dataclass(frozen=True)
class SimilarityGradient:
    """d(similarity of one frame) / d(its aligned crop)."""

    values: NDArray[np.float32]
    """float32 [3, S, S], by crop pixels scaled to 0..1, channels R, G, B."""
    frame_from_crop: NDArray[np.float64]
    """float64 [2, 3], crop pixels to frame pixels."""


@dataclass(frozen=True)
class FrameScore:
    """The score of one frame."""

    frame_index: int
    similarity: float | None
    """Cosine to the identity, -1 to 1; None without an embedded face."""
    observation: FaceObservation
    thumbnails: Thumbnails | None = field(default=None, compare=False, repr=False)
    """Inside the scorer only: a VideoReward's frames have none."""
    gradient: SimilarityGradient | None = field(default=None, compare=False, repr=False)
    """Inside the scorer only, when ScoreOptions.include_crop_gradients is on and a face was embedded."""


@dataclass(frozen=True)
class RewardComponent:
    """One named part of a reward."""

    name: str
    value: float
    weight: float


@dataclass(frozen=True)
class CropGradient:
    """d(VideoReward.value) / d(aligned crop) of one embedded frame; detection and alignment count as constants."""

    frame_index: int
    values: NDArray[np.float32]
    """float32 [3, S, S], by crop pixels scaled to 0..1, channels R, G, B."""
    frame_from_crop: NDArray[np.float64]
    """float64 [2, 3]: the crop's pixel (x, y) is the frame's at this matrix times (x, y, 1)."""


@dataclass(frozen=True)
class VideoReward:
    """The reward of one video. Always finite; a video without a face has one too."""

    value: float
    components: tuple[RewardComponent, ...]
    """What `value` is made of: it is their weighted sum."""
    frame_count: int
    embedded_frame_count: int
    """Frames with an embedded face."""
    model_fingerprint: str
    frames: tuple[FrameScore, ...]
    """One entry per frame, or none when ScoreOptions.include_frames is off."""
    motion: VideoMotion = VideoMotion(0.0, None)
    """How much it moves; what other videos' motion can be measured by."""
    crop_gradients: tuple[CropGradient, ...] = field(default=(), compare=False, repr=False)
    """One entry per embedded frame when ScoreOptions.include_crop_gradients is on, else none."""

    @property
    def coverage(self) -> float:
        """Share of frames with an embedded face, 0 to 1."""
        return self.embedded_frame_count / self.frame_count

    @property
    def similarities(self) -> list[float | None]:
        """Cosine of each frame, None where no face was embedded."""
        return [frame.similarity for frame in self.frames]

    def component(self, name: str) -> float:
        """Returns the value of a named component. Raises KeyError naming those there are."""
        for component in self.components:
            if component.name == name:
                return component.value
        raise KeyError(f"no component {name!r}; there are {[component.name for component in self.components]}")


@dataclass(frozen=True)
class Limits:
    """What a request must stay within."""

    max_message_bytes: int
    max_frames_per_video: int
    max_pixels_per_frame: int
    max_videos_in_flight: int
    max_images: int
    max_pixels_per_image: int


@dataclass(frozen=True)
class ServerInfo:
    """What a server says about itself."""

    server_version: str
    model_fingerprint: str
    pack_name: str
    embedding_length: int
    detector_size: tuple[int, int]
    """Width and height of the detector's input, pixels."""
    component_names: tuple[str, ...]
    limits: Limits
    has_crop_gradients: bool = False
    """Whether it can answer ScoreOptions.include_crop_gradients."""
