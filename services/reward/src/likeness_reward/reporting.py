"""What the command line prints."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from likeness_reward.domain import Face, FaceObservation, FrameScore, IdentityTemplate, ServerInfo, VideoReward
from likeness_reward.errors import LikenessError
from likeness_reward.inference.served_models import GRADIENT

if TYPE_CHECKING:
    from likeness_reward.pack.pack import Pack
    from likeness_reward.pack.triton_repository import ExportedRepository


def reward_document(video: Path, reward: VideoReward, *, per_frame: bool) -> dict[str, Any]:
    """Returns a reward as a JSON document."""
    document: dict[str, Any] = {
        "video": str(video),
        "reward": reward.value,
        "components": [{"name": part.name, "value": part.value, "weight": part.weight} for part in reward.components],
        "frame_count": reward.frame_count,
        "embedded_frame_count": reward.embedded_frame_count,
        "similarities": reward.similarities,
        "motion": {"scene": reward.motion.scene, "face": reward.motion.face},
        "model_fingerprint": reward.model_fingerprint,
    }
    if per_frame:
        document["frames"] = [frame_document(frame) for frame in reward.frames]
    return document


def error_document(video: Path, error: LikenessError) -> dict[str, Any]:
    """Returns why a video has no reward as a JSON document."""
    return {"video": str(video), "error": {"reason": error.reason, "message": error.message}}


def frame_document(frame: FrameScore) -> dict[str, Any]:
    """Returns one frame's score as a JSON document."""
    face = frame.observation.face
    return {
        "frame_index": frame.frame_index,
        "verdict": frame.observation.verdict.value,
        "similarity": frame.similarity,
        "face_count": frame.observation.face_count,
        "face": face_document(face) if face is not None else None,
    }


def face_document(face: Face) -> dict[str, Any]:
    """Returns a face as a JSON document; pixels of the frame."""
    return {
        "box": [float(edge) for edge in face.box],
        "detection_score": face.score,
        "landmarks": face.landmarks.tolist(),
    }


def server_report(endpoint: str, server: ServerInfo) -> str:
    """Returns what a server says of itself, for people to read."""
    width, height = server.detector_size
    lines = [
        f"{endpoint} serves pack {server.pack_name} (likeness-reward {server.server_version})",
        f"models                {server.model_fingerprint}",
        f"detector size         {width}x{height}",
        f"embedding length      {server.embedding_length}",
        f"components            {', '.join(server.component_names)}",
    ]
    lines += [f"{name:<21} {value}" for name, value in dataclasses.asdict(server.limits).items()]
    return "\n".join(lines)


def reward_table(video: Path, reward: VideoReward, *, per_frame: bool) -> str:
    """Returns a reward for people to read: one line, then with `per_frame` one line a frame."""
    parts = ", ".join(f"{part.name} {part.value:.4f} (weight {part.weight:g})" for part in reward.components)
    faces = f"face in {reward.embedded_frame_count} of {reward.frame_count} frames"
    lines = [f"{reward.value:8.4f}  {video}  {parts}; {faces}"]
    if per_frame:
        lines.append("   frame  similarity  faces  width  verdict")
        lines += [frame_line(frame) for frame in reward.frames]
    return "\n".join(lines)


def frame_line(frame: FrameScore) -> str:
    """Returns one row of the per-frame table."""
    face = frame.observation.face
    similarity = "-" if frame.similarity is None else f"{frame.similarity:.4f}"
    width = "-" if face is None else f"{face.width:.0f}"
    verdict = frame.observation.verdict.value
    return f"   {frame.frame_index:5d}  {similarity:>10}  {frame.observation.face_count:5d}  {width:>5}  {verdict}"


def embedding_report(
    images: Sequence[Path], observations: Sequence[FaceObservation], template: IdentityTemplate, output: Path
) -> str:
    """Returns what became of each image, and the template."""
    lines = [
        f"{observation.verdict.value:16}  {observation.face_count} faces  {image}"
        for image, observation in zip(images, observations, strict=True)
    ]
    size, fingerprint = template.embedding.size, template.model_fingerprint[:12]
    lines.append(f"{template.image_count} of {len(images)} images -> {output} ({size} numbers, models {fingerprint})")
    return "\n".join(lines)


def pack_report(pack: "Pack", embedding_length: int) -> str:
    """Returns a pack for people to read."""
    lines = [f"pack {pack.name} in {pack.directory}"]
    for network in pack.networks:
        in_use = network in (pack.detector, pack.recognizer)
        role = network.role if in_use else f"{network.role}, not used" if network.role != "unused" else "not used"
        outputs = ", ".join(map(str, network.outputs))
        lines += [f"  {network.path.name}: {role}", f"    input   {network.input}", f"    outputs {outputs}"]
    (width, height), letterbox = pack.detector_config.size, pack.detector_config.letterbox
    lines += [
        f"detector size     {width}x{height}, letterbox {letterbox}",
        f"embedding length  {embedding_length}",
        f"recognizer input  (x - {pack.recognizer_config.input_mean:g}) / {pack.recognizer_config.input_std:g}",
        f"fingerprint       {pack.fingerprint}",
        "smoke inference   ok",
    ]
    return "\n".join(lines)


def compared(model: str) -> str:
    """Returns what was compared when a model of a repository was written."""
    return "similarities against the pack's own" if model == GRADIENT else "batched against one by one"


def repository_report(repository: "ExportedRepository") -> str:
    """Returns what was written to a Triton model repository, for people to read."""
    lines = [f"model repository {repository.directory}"]
    for model in repository.models:
        lines += [
            f"  {model.name}, from {model.source.name}",
            f"    input   {model.input}",
            f"    outputs {', '.join(model.outputs)}",
            f"    {compared(model.name)}: largest difference {model.largest_difference:.1e}",
        ]
    return "\n".join([*lines, f"fingerprint {repository.fingerprint}"])
