"""Local files to frames: videos, folders of frames and single images."""

import math
from collections.abc import Iterator
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray

from likeness_reward.errors import LikenessError, UnreadableVideo
from likeness_reward.images import decode_image

IMAGE_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp"})
FOLDER_RATE = 16.0
"""Frames a second of a folder of frames: Wan's."""


def read_video(path: Path) -> NDArray[np.uint8]:
    """Returns the RGB frames uint8 [T, H, W, 3] of a video file, a folder of frames (by name) or an image (T = 1).

    Rotation metadata is applied. Raises UnreadableVideo naming the file and why.
    """
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix.lower() in IMAGE_SUFFIXES)
        if not files:
            raise UnreadableVideo(f"{path}: the folder holds no {', '.join(sorted(IMAGE_SUFFIXES))} files", path=path)
        return stack_frames(path, (read_image(file) for file in files))
    if not path.exists():
        raise UnreadableVideo(f"{path}: no such file", path=path)
    if path.suffix.lower() in IMAGE_SUFFIXES:
        return read_image(path)[None]
    return stack_frames(path, read_video_file(path))


def frame_rate(path: Path) -> float:
    """Returns the frames a second of a video file; FOLDER_RATE for what has none."""
    if path.is_dir() or path.suffix.lower() in IMAGE_SUFFIXES:
        return FOLDER_RATE
    capture = cv2.VideoCapture(str(path), cv2.CAP_FFMPEG)
    rate = capture.get(cv2.CAP_PROP_FPS)
    capture.release()
    return rate if math.isfinite(rate) and rate > 0 else FOLDER_RATE


def read_image(path: Path) -> NDArray[np.uint8]:
    """Returns the RGB pixels uint8 [H, W, 3] of an image file. Raises UnreadableVideo."""
    try:
        return decode_image(path.read_bytes(), what=str(path))
    except OSError as error:
        raise UnreadableVideo(f"{path}: {error.strerror}", path=path) from error
    except LikenessError as error:
        raise UnreadableVideo(error.message, path=path) from error


def read_video_file(path: Path) -> Iterator[NDArray[np.uint8]]:
    """Yields the RGB frames uint8 [H, W, 3] of a video file."""
    capture = cv2.VideoCapture(str(path), cv2.CAP_FFMPEG)
    try:
        if not capture.isOpened():
            raise UnreadableVideo(f"{path} cannot be opened as a video ({path.stat().st_size} bytes)", path=path)
        while True:
            is_frame, frame = capture.read()
            if not is_frame:
                return
            yield cv2.cvtColor(frame, cv2.COLOR_BGR2RGB).astype(np.uint8, copy=False)
    finally:
        capture.release()


def stack_frames(path: Path, frames: Iterator[NDArray[np.uint8]]) -> NDArray[np.uint8]:
    """Returns the frames as one array [T, H, W, 3]. Raises UnreadableVideo when there are none or sizes differ."""
    kept: list[NDArray[np.uint8]] = []
    for frame in frames:
        if kept and frame.shape != kept[0].shape:
            sizes = f"{frame.shape[1]}x{frame.shape[0]}, frame 0 is {kept[0].shape[1]}x{kept[0].shape[0]}"
            raise UnreadableVideo(f"{path}: frame {len(kept)} is {sizes}", path=path)
        kept.append(frame)
    if not kept:
        raise UnreadableVideo(f"{path}: no frame can be decoded", path=path)
    return np.stack(kept)
