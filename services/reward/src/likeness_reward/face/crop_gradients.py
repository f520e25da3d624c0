"""Gradients of frame similarities to the gradients of a reward's value: pure arithmetic."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from likeness_reward.domain import CropGradient, FrameScore, ScoreOptions
from likeness_reward.errors import InferenceFailed, InvalidRequest
from likeness_reward.face.alignment import estimate_similarity


def invert_alignment(landmarks: NDArray[np.floating], crop_size: int) -> NDArray[np.float64]:
    """Returns the 2x3 matrix, crop pixels to frame pixels, of the alignment of landmarks [5, 2]."""
    crop_from_frame = np.vstack([estimate_similarity(landmarks, crop_size), [0.0, 0.0, 1.0]])
    return np.linalg.inv(crop_from_frame)[:2]


def check_differentiable(options: ScoreOptions) -> None:
    """Raises InvalidRequest when a component with a weight has a gradient that is not computed."""
    if options.include_crop_gradients and options.motion_weight != 0.0:
        raise InvalidRequest(
            f"options.include_crop_gradients goes with a weight of motion of 0, not {options.motion_weight:g}: "
            "motion is not differentiated, and a gradient without it would not be that of the value",
            field="options.include_crop_gradients",
        )


def value_gradients(scores: Sequence[FrameScore], options: ScoreOptions) -> tuple[CropGradient, ...]:
    """Returns d(value) / d(crop) of every embedded frame of a video.

    identity is a mean over all T frames, so that d(value)/d(similarity) = identity_weight / T in each of them. With the
    least over frames it is identity_weight in the first frame that is least and 0 in the others; all are 0 when the
    least is a frame without a face. Coverage, detection and alignment count as constants.

    Raises InferenceFailed when one is not finite.

    Args:
        scores: of all T frames of the video; the embedded ones have the gradients of their similarities.
    """
    similarities = [options.no_face_value if score.similarity is None else score.similarity for score in scores]
    least = int(np.argmin(similarities))
    result = []
    for position, score in enumerate(scores):
        gradient = score.gradient
        if gradient is None:
            continue
        share = float(position == least) if options.aggregation == "min" else 1.0 / len(scores)
        values = gradient.values * np.float32(options.identity_weight * share)
        if not np.isfinite(values).all():
            raise InferenceFailed(f"the gradient of frame {score.frame_index} is not finite")
        result.append(CropGradient(score.frame_index, values, gradient.frame_from_crop))
    return tuple(result)
