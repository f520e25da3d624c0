"""Scoring with networks that Triton runs. Needs the [server] and [triton] extras."""

import time
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import numpy as np
from pydantic import BaseModel, ValidationError

from likeness_reward.embedded import FaceScorer
from likeness_reward.errors import FingerprintMismatch, InvalidRepository, LikenessError
from likeness_reward.extras import require_triton_extra
from likeness_reward.face.detector import DetectorConfig, LetterboxKind, anchor_counts
from likeness_reward.face.recognizer import RecognizerConfig
from likeness_reward.inference.call import CURRENT_CALL, Call
from likeness_reward.inference.session import RecognizerGradient

require_triton_extra("scoring with Triton")

from likeness_reward.inference.served_models import DETECTOR, GRADIENT, RECOGNIZER  # noqa: E402
from likeness_reward.inference.shared_memory import SharedMemoryMode  # noqa: E402
from likeness_reward.inference.triton import (  # noqa: E402
    TritonConnection,
    TritonRecognizerGradient,
    TritonSession,
)
from likeness_reward.pack.pack import PackDescription, fingerprint_of, load_pack  # noqa: E402

Config = TypeVar("Config", bound=BaseModel)


class TritonScorer(FaceScorer):
    """A FaceScorer whose networks run in Triton; what they are, Triton's model configurations say."""

    def __init__(
        self,
        url: str,
        *,
        shared_memory: SharedMemoryMode = "auto",
        timeout_s: float = 30.0,
        start_timeout_s: float = 60.0,
    ) -> None:
        """Connects to Triton at HOST:PORT and waits for its models.

        Raises InferenceServerUnavailable or InvalidRepository.
        """
        self.connection = TritonConnection(url, timeout_s=timeout_s, shared_memory=shared_memory)
        try:
            self.connection.wait_until_ready(start_timeout_s)
            detector = TritonSession(self.connection, DETECTOR, anchor_counts)
            recognizer = TritonSession(self.connection, RECOGNIZER)
            super().__init__(description_of(detector, recognizer), detector, recognizer, "triton")
            self._triton_gradient = open_gradient(self.connection, recognizer)
        except LikenessError:
            self.connection.close()
            raise

    @cached_property
    def gradient_source(self) -> Callable[[], RecognizerGradient] | str:
        """The model of gradients that was in Triton when this scorer connected."""
        gradient = self._triton_gradient
        if gradient is None:
            return f"Triton at {self.connection.url} has no model {GRADIENT}; export the pack with --gradients"
        return lambda: gradient

    def check_networks(self) -> None:
        """Runs all networks on a black picture. Raises InferenceFailed when one does not give what it should."""
        super().check_networks()
        if self._triton_gradient is not None:
            size = self.analyzer.recognizer.crop_size
            black, template = np.zeros((1, size, size, 3), np.uint8), np.zeros(self.embedding_length, np.float32)
            self._triton_gradient.similarity_gradients(black, template)

    def check_pack(
        self, directory: Path, detector_size: tuple[int, int] | None, letterbox: LetterboxKind | None = None
    ) -> None:
        """Raises FingerprintMismatch unless Triton's models are those of a folder."""
        pack = load_pack(directory, detector_size=detector_size, letterbox=letterbox)
        if pack.fingerprint != self.model_fingerprint:
            raise FingerprintMismatch(
                f"pack {directory} has fingerprint {pack.fingerprint[:12]}, the models of Triton at "
                f"{self.connection.url} have {self.model_fingerprint[:12]}: export the pack again",
                found=self.model_fingerprint,
                expected=pack.fingerprint,
            )

    def check_ready(self, interval_s: float) -> None:
        """Runs the networks once within `interval_s`, unless an inference succeeded within the last `interval_s`.

        Raises InferenceServerUnavailable, DeadlineExceeded or InferenceFailed.
        """
        if time.monotonic() - self.connection.last_success_s <= interval_s:
            return
        previous = CURRENT_CALL.set(Call(interval_s))
        try:
            self.check_networks()
        finally:
            CURRENT_CALL.reset(previous)


def open_gradient(connection: TritonConnection, recognizer: TritonSession) -> TritonRecognizerGradient | None:
    """Returns Triton's model of gradients, or None without one.

    Raises InvalidRepository when it is not that of the recognizer, or InferenceServerUnavailable.
    """
    if not connection.has_gradient():
        return None
    gradient = TritonRecognizerGradient(connection)
    if gradient.parameters != recognizer.parameters:
        raise InvalidRepository(
            f"model {GRADIENT} on Triton at {connection.url} is of network {gradient.parameters.network_hash[:12]}, "
            f"{RECOGNIZER} is {recognizer.parameters.network_hash[:12]}: export the pack again",
            url=connection.url,
            model=GRADIENT,
        )
    return gradient


def description_of(detector: TritonSession, recognizer: TritonSession) -> PackDescription:
    """Returns the pack that two models were exported from. Raises InvalidRepository."""
    detector_config = config_of(DetectorConfig, detector, DETECTOR)
    recognizer_config = config_of(RecognizerConfig, recognizer, RECOGNIZER)
    if detector_config.letterbox == "fit" and None not in detector.input.shape[1:]:
        raise InvalidRepository(
            f"model {DETECTOR} takes one size, the letterbox fit needs several; export the pack again"
        )
    return PackDescription(
        name=detector.parameters.pack_name,
        detector_config=detector_config,
        recognizer_config=recognizer_config,
        fingerprint=fingerprint_of(
            detector.parameters.network_hash, recognizer.parameters.network_hash, detector_config, recognizer_config
        ),
    )


def config_of(kind: type[Config], session: TritonSession, model: str) -> Config:
    """Returns the configuration that a model was exported with. Raises InvalidRepository."""
    try:
        return kind.model_validate_json(session.parameters.config)
    except ValidationError as error:
        raise InvalidRepository(
            f"model {model}: parameter config is {session.parameters.config!r}, which this version cannot read: "
            f"{error.errors()[0]['msg']}; export the pack again",
            model=model,
        ) from error
