"""A copy of a video in which every frame shows the face that was scored. Needs the [visual] extra."""

from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import av
import cv2
import numpy as np
from numpy.typing import NDArray

from likeness_reward.domain import FrameScore, VideoReward

GREEN, RED, WHITE, BLACK = (60, 220, 90), (235, 70, 60), (255, 255, 255), (0, 0, 0)


def write_annotated(frames_rgb: NDArray[np.uint8], reward: VideoReward, rate: float, output: Path) -> None:
    """Writes frames uint8 [T, H, W, 3] with box, landmarks and similarity as H.264 in MP4; `rate` is frames a second.

    A side of an odd number of pixels loses its last one, since 4:2:0 has none. The file appears when it is complete.
    """
    height, width = (side - side % 2 for side in frames_rgb.shape[1:3])
    partial = output.with_name(f".{output.stem}.partial{output.suffix}")
    try:
        with av.open(str(partial), "w", format="mp4") as container:
            stream = container.add_stream("libx264", rate=Fraction(rate).limit_denominator(1001))
            stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
            stream.options = {"crf": "18"}
            for picture in annotated_frames(frames_rgb, reward):
                frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(picture[:height, :width]), format="rgb24")
                container.mux(stream.encode(frame))
            container.mux(stream.encode(None))
        partial.replace(output)
    finally:
        partial.unlink(missing_ok=True)


def annotated_frames(frames_rgb: NDArray[np.uint8], reward: VideoReward) -> Iterator[NDArray[np.uint8]]:
    """Yields copies of the frames uint8 [H, W, 3] with what was seen drawn on them."""
    for pixels, score in zip(frames_rgb, reward.frames, strict=True):
        picture = pixels.copy()
        _draw_face(picture, score)
        similarity = score.observation.verdict.value.replace("_", " ")
        if score.similarity is not None:
            similarity = f"{score.similarity:.3f}"
        _draw_text(picture, f"{score.frame_index}: {similarity}   video {reward.value:.3f}")
        yield picture


def _draw_face(picture: NDArray[np.uint8], score: FrameScore) -> None:
    face = score.observation.face
    if face is None:
        return
    left, top, right, bottom = (round(float(edge)) for edge in face.box)
    thickness = max(1, round(min(picture.shape[:2]) / 240))
    cv2.rectangle(picture, (left, top), (right, bottom), GREEN, thickness)
    for x, y in face.landmarks:
        cv2.circle(picture, (round(float(x)), round(float(y))), thickness + 1, RED, -1)


def _draw_text(picture: NDArray[np.uint8], text: str) -> None:
    height, width = picture.shape[:2]
    font = cv2.FONT_HERSHEY_SIMPLEX
    (unit_width, unit_height), _ = cv2.getTextSize(text, font, 1.0, 1)
    size = min(0.9 * width / unit_width, 0.05 * height / unit_height)
    place = (round(0.03 * width), round(0.03 * height + size * unit_height))
    thickness = max(1, round(size * 2))
    cv2.putText(picture, text, place, font, size, BLACK, thickness + 2, cv2.LINE_AA)
    cv2.putText(picture, text, place, font, size, WHITE, thickness, cv2.LINE_AA)
