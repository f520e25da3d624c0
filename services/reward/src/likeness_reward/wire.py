"""Protocol buffer messages to the words of domain.py and back, for client and server alike."""

from collections.abc import Mapping

import numpy as np
from pydantic import ValidationError

from likeness.reward.v1 import identity_pb2, reward_pb2, reward_service_pb2, video_pb2
from likeness_reward.domain import (
    COMPONENT_NAMES,
    COVERAGE_COMPONENT,
    IDENTITY_COMPONENT,
    MOTION_COMPONENT,
    Face,
    FaceObservation,
    FrameScore,
    IdentityTemplate,
    Limits,
    Pooling,
    RewardComponent,
    ScoreOptions,
    ServerInfo,
    Verdict,
    VideoMotion,
    VideoReward,
)
from likeness_reward.errors import InvalidRequest, InvalidTemplate
from likeness_reward.gradient_wire import encoding_from_message, encoding_to_message

FLOAT32 = np.dtype("<f4")

_VERDICTS: Mapping[Verdict, identity_pb2.FaceObservation.Verdict] = {
    Verdict.EMBEDDED: identity_pb2.FaceObservation.VERDICT_EMBEDDED,
    Verdict.NO_FACE: identity_pb2.FaceObservation.VERDICT_NO_FACE,
    Verdict.FACE_TOO_SMALL: identity_pb2.FaceObservation.VERDICT_FACE_TOO_SMALL,
    Verdict.ALIGNMENT_FAILED: identity_pb2.FaceObservation.VERDICT_ALIGNMENT_FAILED,
}
_VERDICT_BY_NUMBER = {int(number): verdict for verdict, number in _VERDICTS.items()}


def identity_to_message(identity: IdentityTemplate) -> identity_pb2.IdentityTemplate:
    """Returns the message of a template."""
    return identity_pb2.IdentityTemplate(
        embedding=identity.embedding.astype(FLOAT32).tobytes(),
        model_fingerprint=identity.model_fingerprint,
        image_count=identity.image_count,
    )


def identity_from_message(message: identity_pb2.IdentityTemplate) -> IdentityTemplate:
    """Returns the template of a message. Raises InvalidTemplate when it holds no whole float32 numbers."""
    size = len(message.embedding)
    if size == 0 or size % FLOAT32.itemsize != 0:
        raise InvalidTemplate(f"the identity template's embedding has {size} bytes, no float32 numbers", found=size)
    embedding = np.frombuffer(message.embedding, FLOAT32).astype(np.float32)
    return IdentityTemplate(embedding, message.model_fingerprint, message.image_count)


def pooling_to_message(pooling: Pooling) -> identity_pb2.Pooling:
    """Returns the enum value of a pooling."""
    return {
        "mean": identity_pb2.POOLING_MEAN,
        "quality_weighted": identity_pb2.POOLING_QUALITY_WEIGHTED,
    }[pooling]


def pooling_from_message(value: int) -> Pooling:
    """Returns the pooling of an enum value. Raises InvalidRequest."""
    if value in (identity_pb2.POOLING_UNSPECIFIED, identity_pb2.POOLING_MEAN):
        return "mean"
    if value == identity_pb2.POOLING_QUALITY_WEIGHTED:
        return "quality_weighted"
    raise InvalidRequest(f"pooling {value} is unknown; allowed are {identity_pb2.Pooling.keys()}", field="pooling")


def options_to_message(options: ScoreOptions) -> reward_pb2.ScoreOptions:
    """Returns the message of score options."""
    return reward_pb2.ScoreOptions(
        aggregation=reward_pb2.AGGREGATION_MIN if options.aggregation == "min" else reward_pb2.AGGREGATION_MEAN,
        no_face_value=options.no_face_value,
        min_face_pixels=options.min_face_pixels,
        include_frames=options.include_frames,
        include_crop_gradients=options.include_crop_gradients,
        gradient_encoding=encoding_to_message(options.gradient_encoding),
        face_choice=(
            reward_pb2.FACE_CHOICE_MOST_SIMILAR
            if options.face_choice == "most_similar"
            else reward_pb2.FACE_CHOICE_LARGEST
        ),
        component_weights=[
            reward_pb2.ComponentWeight(name=IDENTITY_COMPONENT, weight=options.identity_weight),
            reward_pb2.ComponentWeight(name=COVERAGE_COMPONENT, weight=options.coverage_weight),
            reward_pb2.ComponentWeight(name=MOTION_COMPONENT, weight=options.motion_weight),
        ],
    )


def options_from_message(message: reward_pb2.ScoreOptions) -> ScoreOptions:
    """Returns the options of a message. Raises InvalidRequest naming the field and what it allows."""
    if message.aggregation not in reward_pb2.Aggregation.values():
        raise InvalidRequest(f"options.aggregation {message.aggregation} is unknown", field="options.aggregation")
    if message.face_choice not in reward_pb2.FaceChoice.values():
        raise InvalidRequest(f"options.face_choice {message.face_choice} is unknown", field="options.face_choice")
    if message.gradient_encoding not in reward_pb2.GradientEncoding.values():
        found = message.gradient_encoding
        raise InvalidRequest(f"options.gradient_encoding {found} is unknown", field="options.gradient_encoding")
    fields: dict[str, object] = {
        "aggregation": "min" if message.aggregation == reward_pb2.AGGREGATION_MIN else "mean",
        "face_choice": "most_similar" if message.face_choice == reward_pb2.FACE_CHOICE_MOST_SIMILAR else "largest",
        "include_frames": message.include_frames,
        "include_crop_gradients": message.include_crop_gradients,
        "gradient_encoding": encoding_from_message(message.gradient_encoding),
    }
    for name in ("no_face_value", "min_face_pixels"):
        if message.HasField(name):
            fields[name] = getattr(message, name)
    if message.component_weights:
        fields |= weights_from_message(message)
    try:
        return ScoreOptions.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        field = f"options.{first['loc'][0]}"
        raise InvalidRequest(f"{field} is {first['input']}: {first['msg']}", field=field) from error


def weights_from_message(message: reward_pb2.ScoreOptions) -> dict[str, float]:
    """Returns the weights named in a message as fields of ScoreOptions; those not named are 0."""
    weights = {f"{name}_weight": 0.0 for name in COMPONENT_NAMES}
    for entry in message.component_weights:
        if entry.name not in COMPONENT_NAMES:
            allowed = ", ".join(COMPONENT_NAMES)
            message_text = f"options.component_weights: no component {entry.name!r}; there are {allowed}"
            raise InvalidRequest(message_text, field="options.component_weights")
        weights[f"{entry.name}_weight"] = entry.weight
    return weights


def observation_to_message(observation: FaceObservation) -> identity_pb2.FaceObservation:
    """Returns the message of an observation."""
    message = identity_pb2.FaceObservation(verdict=_VERDICTS[observation.verdict], face_count=observation.face_count)
    if observation.face is not None:
        x_min, y_min, x_max, y_max = (float(edge) for edge in observation.face.box)
        message.face.CopyFrom(
            identity_pb2.Face(
                x_min=x_min,
                y_min=y_min,
                x_max=x_max,
                y_max=y_max,
                detection_score=observation.face.score,
                landmarks=observation.face.landmarks.ravel().tolist(),
            )
        )
    return message


def observation_from_message(message: identity_pb2.FaceObservation) -> FaceObservation:
    """Returns the observation of a message."""
    face = None
    if message.HasField("face"):
        box = np.array([message.face.x_min, message.face.y_min, message.face.x_max, message.face.y_max], np.float32)
        landmarks = np.array(message.face.landmarks, np.float32).reshape(-1, 2)
        face = Face(box, message.face.detection_score, landmarks)
    return FaceObservation(_VERDICT_BY_NUMBER[message.verdict], message.face_count, face)


def motion_to_message(motion: VideoMotion) -> reward_pb2.VideoMotion:
    """Returns the message of a motion."""
    return reward_pb2.VideoMotion(scene=motion.scene, face=motion.face)


def motion_from_message(message: reward_pb2.VideoMotion) -> VideoMotion:
    """Returns the motion of a message."""
    return VideoMotion(message.scene, message.face if message.HasField("face") else None)


def reference_motion_of(
    message: reward_service_pb2.ScoreVideoRequest | reward_service_pb2.StreamConfig | video_pb2.VideoStart,
) -> VideoMotion | None:
    """Returns the reference motion of a message that has one. Raises InvalidRequest unless it is within 0 to 1."""
    if not message.HasField("reference_motion"):
        return None
    motion = motion_from_message(message.reference_motion)
    for name, value in (("scene", motion.scene), ("face", motion.face)):
        if value is not None and not 0.0 <= value <= 1.0:
            field = f"reference_motion.{name}"
            raise InvalidRequest(f"{field} is {value:g}; it must be within 0 to 1", field=field)
    return motion


def reward_to_message(reward: VideoReward) -> reward_pb2.Reward:
    """Returns the message of a reward."""
    return reward_pb2.Reward(
        value=reward.value,
        components=[
            reward_pb2.RewardComponent(name=part.name, value=part.value, weight=part.weight)
            for part in reward.components
        ],
        frame_count=reward.frame_count,
        embedded_frame_count=reward.embedded_frame_count,
        model_fingerprint=reward.model_fingerprint,
        motion=motion_to_message(reward.motion),
        frames=[
            reward_pb2.FrameScore(
                frame_index=frame.frame_index,
                similarity=frame.similarity,
                observation=observation_to_message(frame.observation),
            )
            for frame in reward.frames
        ],
    )


def reward_from_message(message: reward_pb2.Reward) -> VideoReward:
    """Returns the reward of a message."""
    return VideoReward(
        value=message.value,
        components=tuple(RewardComponent(part.name, part.value, part.weight) for part in message.components),
        frame_count=message.frame_count,
        embedded_frame_count=message.embedded_frame_count,
        model_fingerprint=message.model_fingerprint,
        motion=motion_from_message(message.motion),
        frames=tuple(
            FrameScore(
                frame.frame_index,
                frame.similarity if frame.HasField("similarity") else None,
                observation_from_message(frame.observation),
            )
            for frame in message.frames
        ),
    )


def limits_to_message(limits: Limits) -> reward_service_pb2.Limits:
    """Returns the message of limits."""
    return reward_service_pb2.Limits(
        max_message_bytes=limits.max_message_bytes,
        max_frames_per_video=limits.max_frames_per_video,
        max_pixels_per_frame=limits.max_pixels_per_frame,
        max_videos_in_flight=limits.max_videos_in_flight,
        max_images=limits.max_images,
        max_pixels_per_image=limits.max_pixels_per_image,
    )


def server_info_from_message(message: reward_service_pb2.GetServerInfoResponse) -> ServerInfo:
    """Returns what a server says about itself."""
    return ServerInfo(
        server_version=message.server_version,
        model_fingerprint=message.model_fingerprint,
        pack_name=message.pack_name,
        embedding_length=message.embedding_length,
        detector_size=(message.detector_width, message.detector_height),
        component_names=tuple(message.component_names),
        has_crop_gradients=reward_service_pb2.FEATURE_CROP_GRADIENTS in message.features,
        limits=Limits(
            max_message_bytes=message.limits.max_message_bytes,
            max_frames_per_video=message.limits.max_frames_per_video,
            max_pixels_per_frame=message.limits.max_pixels_per_frame,
            max_videos_in_flight=message.limits.max_videos_in_flight,
            max_images=message.limits.max_images,
            max_pixels_per_image=message.limits.max_pixels_per_image,
        ),
    )
