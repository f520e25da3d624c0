"""Scoring in this process, without a server. Needs the [embedded] extra."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import cached_property, partial
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from likeness_reward.domain import (
    FaceObservation,
    FrameScore,
    IdentityTemplate,
    Pooling,
    ScoreOptions,
    SimilarityGradient,
    VideoMotion,
    VideoReward,
)
from likeness_reward.errors import (
    FeatureUnavailable,
    FingerprintMismatch,
    InferenceFailed,
    InvalidImage,
    InvalidPack,
    InvalidTemplate,
    InvalidVideo,
    LikenessError,
    NoFaceInImages,
)
from likeness_reward.extras import has_gradients_extra, require_embedded_extra
from likeness_reward.face.analysis import FaceAnalyzer, FrameAnalysis
from likeness_reward.face.crop_gradients import check_differentiable, invert_alignment
from likeness_reward.face.detector import INPUT_MEAN, INPUT_STD, FaceDetector, LetterboxKind
from likeness_reward.face.motion import thumbnails_of
from likeness_reward.face.recognizer import FaceRecognizer
from likeness_reward.face.scoring import check_reference_motion, cosine, pool_embeddings, reward_from_frames
from likeness_reward.images import MAX_PIXELS, decode_image
from likeness_reward.inference.session import InferenceSession, RecognizerGradient
from likeness_reward.many import VideoToScore, check_concurrency
from likeness_reward.video_stream import VideoOutcome

require_embedded_extra("scoring in this process")

from likeness_reward.inference.onnx_gradients import OnnxRecognizerGradient  # noqa: E402
from likeness_reward.inference.onnxruntime import PROVIDER_NAMES, OnnxRuntimeSession, Provider  # noqa: E402
from likeness_reward.pack.gradient_network import why_not_differentiable  # noqa: E402
from likeness_reward.pack.pack import Pack, PackDescription, load_pack  # noqa: E402

FRAMES_AT_ONCE = 8
LARGEST_DISAGREEMENT = 1e-3
"""Largest difference of a similarity between the network that is differentiated and the one that scores."""
CPU_PROVIDER = PROVIDER_NAMES["cpu"]


class FaceScorer:
    """Identities and rewards from one pack of networks. Pure: threads may share it."""

    def __init__(
        self, pack: PackDescription, detector: InferenceSession, recognizer: InferenceSession, provider: str = "other"
    ) -> None:
        self.pack = pack
        self.provider = provider
        """What runs the networks: onnxruntime's execution provider in use, or triton."""
        self.analyzer = FaceAnalyzer(
            FaceDetector(detector, pack.detector_config), FaceRecognizer(recognizer, pack.recognizer_config)
        )
        self.embedding_length = self.analyzer.recognizer.embedding_length()
        self._gradient: RecognizerGradient | None = None
        self._gradient_lock = threading.Lock()

    @property
    def model_fingerprint(self) -> str:
        """Hash of detector, recognizer and preprocessing."""
        return self.pack.fingerprint

    @property
    def frames_at_once(self) -> int:
        """How many frames a thread should take: on a CPU a batch is no faster, and single frames spread better."""
        return 1 if self.provider == CPU_PROVIDER else FRAMES_AT_ONCE

    def observe_stages(self, observe: Callable[[str, float], None]) -> None:
        """Has `observe` told the seconds of each stage of each batch: detect, align, recognize."""
        self.analyzer.observe_stage = observe

    def check_networks(self) -> None:
        """Runs both networks on a black picture. Raises InferenceFailed when one does not give what it should."""
        width, height = self.pack.detector_config.size
        black = np.zeros((height, width, 3), np.uint8)
        self.analyzer.detector.first_pass([black])
        self.analyzer.recognizer.embed([np.full((self.analyzer.recognizer.crop_size,) * 2 + (3,), 127, np.uint8)])

    def embed_identity(
        self, images: Sequence[bytes | NDArray[np.uint8]], pooling: Pooling = "mean"
    ) -> IdentityTemplate:
        """Returns the identity of images: JPEG, PNG or WebP files, or RGB arrays uint8 [H, W, 3].

        Images without a usable face are left out. Raises InvalidImage, LimitExceeded or NoFaceInImages.
        """
        return self.embed_identity_with_observations(images, pooling)[0]

    def embed_identity_with_observations(
        self, images: Sequence[bytes | NDArray[np.uint8]], pooling: Pooling = "mean", max_pixels: int = MAX_PIXELS
    ) -> tuple[IdentityTemplate, list[FaceObservation]]:
        """As `embed_identity`; also returns what was seen in each image."""
        if not images:
            raise InvalidImage("no images were given; an identity needs at least one")
        options = ScoreOptions()
        analyses = []
        for index, image in enumerate(images):  # one by one, so that only one is ever decoded
            what = f"images[{index}]"
            if isinstance(image, bytes):
                pixels = decode_image(image, what=what, max_pixels=max_pixels)
            else:
                pixels = check_frames(image[None], what)[0]
            analyses += self.analyzer.analyze([pixels], options)
        observations = [analysis.observation for analysis in analyses]
        usable = [
            (analysis.embedding, analysis.observation.face)
            for analysis in analyses
            if analysis.embedding is not None and analysis.observation.face is not None
        ]
        if not usable:
            verdicts = ", ".join(observation.verdict.value for observation in observations)
            raise NoFaceInImages(f"no usable face in any of {len(images)} images: {verdicts}", verdicts=verdicts)
        embeddings = np.stack([embedding for embedding, _ in usable])
        pooled = pool_embeddings(embeddings, [face.score * face.width for _, face in usable], pooling)
        return IdentityTemplate(pooled, self.model_fingerprint, len(usable)), observations

    def check_identity(self, identity: IdentityTemplate) -> None:
        """Raises InvalidTemplate or FingerprintMismatch unless these networks made the template."""
        if identity.embedding.shape != (self.embedding_length,):
            message = (
                f"the identity template has {identity.embedding.size} numbers; "
                f"the recognizer of pack {self.pack.name} makes {self.embedding_length}"
            )
            raise InvalidTemplate(message, found=identity.embedding.size, expected=self.embedding_length)
        if not np.isfinite(identity.embedding).all():
            raise InvalidTemplate("the identity template has numbers that are not finite")
        if identity.model_fingerprint != self.model_fingerprint:
            raise FingerprintMismatch(
                f"the identity template was made by models {identity.model_fingerprint[:12] or '(unnamed)'}, "
                f"these are {self.model_fingerprint[:12]}: embed the identity again",
                found=identity.model_fingerprint,
                expected=self.model_fingerprint,
            )

    def score_frames(
        self, frames: Sequence[NDArray[np.uint8]], first_index: int, identity: IdentityTemplate, options: ScoreOptions
    ) -> list[FrameScore]:
        """Returns the scores of consecutive RGB frames uint8 [H, W, 3]. Raises InferenceFailed."""
        analyses = self.analyzer.analyze(frames, options, identity.embedding)
        gradients = self._gradients(analyses, identity) if options.include_crop_gradients else [None] * len(analyses)
        return [
            FrameScore(
                first_index + position,
                None if analysis.embedding is None else cosine(analysis.embedding, identity.embedding),
                analysis.observation,
                thumbnails_of(frames[position], analysis.crop),
                gradient,
            )
            for position, (analysis, gradient) in enumerate(zip(analyses, gradients, strict=True))
        ]

    @property
    def has_crop_gradients(self) -> bool:
        """Whether ScoreOptions.include_crop_gradients is honoured."""
        return not isinstance(self.gradient_source, str)

    @cached_property
    def gradient_source(self) -> Callable[[], RecognizerGradient] | str:
        """What loads the differentiable recognizer, or why there is none."""
        return "its networks are not known as ONNX graphs"

    def check_options(self, options: ScoreOptions) -> None:
        """Raises FeatureUnavailable or InvalidRequest when the options ask for gradients that there are not."""
        if not options.include_crop_gradients:
            return
        if not self.has_crop_gradients:
            raise FeatureUnavailable(
                f"options.include_crop_gradients: this scorer has no FEATURE_CROP_GRADIENTS: {self.gradient_source}"
            )
        check_differentiable(options)

    def _gradients(
        self, analyses: Sequence[FrameAnalysis], identity: IdentityTemplate
    ) -> list[SimilarityGradient | None]:
        """Returns the gradient of each frame's similarity; None where no face was embedded.

        Raises InferenceFailed when one is not finite, InvalidPack when they are not those of the network that scores.
        """
        found = [
            (position, analysis.crop, analysis.embedding, analysis.observation.face)
            for position, analysis in enumerate(analyses)
        ]
        shown = [
            (position, crop, embedding, face)
            for position, crop, embedding, face in found
            if crop is not None and embedding is not None and face is not None
        ]
        gradients: list[SimilarityGradient | None] = [None] * len(analyses)
        if not shown:
            return gradients
        crops = np.stack([crop for _, crop, _, _ in shown])
        recognizer = self._recognizer_gradient()
        began = time.perf_counter()
        similarities, values = recognizer.similarity_gradients(crops, identity.embedding)
        self.analyzer.observe_stage("gradient", time.perf_counter() - began)
        if not (np.isfinite(similarities).all() and np.isfinite(values).all()):
            raise InferenceFailed("the gradient of the recognizer is not finite")
        scored = np.stack([embedding for _, _, embedding, _ in shown]) @ identity.embedding
        difference = float(np.abs(similarities - scored).max())
        if difference > LARGEST_DISAGREEMENT:
            raise InvalidPack(
                f"a similarity differs by {difference:.2g} between the recognizer that is differentiated and the one "
                f"that scores; at most {LARGEST_DISAGREEMENT:g} is allowed"
            )
        for (position, crop, _, face), value in zip(shown, values, strict=True):
            gradients[position] = SimilarityGradient(value, invert_alignment(face.landmarks, len(crop)))
        return gradients

    def _recognizer_gradient(self) -> RecognizerGradient:
        """Returns the differentiable recognizer, loaded on first use."""
        with self._gradient_lock:
            if self._gradient is None:
                assert not isinstance(self.gradient_source, str)  # check_options has asked
                self._gradient = self.gradient_source()
            return self._gradient

    def score(
        self,
        frames_rgb: NDArray[np.uint8],
        identity: IdentityTemplate,
        options: ScoreOptions | None = None,
        *,
        reference_motion: VideoMotion | None = None,
    ) -> VideoReward:
        """Returns the reward of a video uint8 [T, H, W, 3]; `reference_motion` is what its motion is measured by.

        Raises InvalidVideo, InvalidTemplate, FingerprintMismatch, InvalidRequest or InferenceFailed.
        """
        options = options or ScoreOptions()
        self.check_options(options)
        check_reference_motion(options, reference_motion)
        self.check_identity(identity)
        frames = check_frames(frames_rgb, "frames_rgb")
        scores: list[FrameScore] = []
        for start in range(0, len(frames), FRAMES_AT_ONCE):
            scores += self.score_frames(list(frames[start : start + FRAMES_AT_ONCE]), start, identity, options)
        return reward_from_frames(scores, options, self.model_fingerprint, reference_motion)

    def score_many(
        self, videos: Iterable[VideoToScore], options: ScoreOptions | None = None, *, concurrency: int = 4
    ) -> Iterator[VideoOutcome]:
        """Yields (video_id, reward or that video's error) of every video, in order of completion.

        `concurrency` threads score; at most one video more is held, so that the next is read meanwhile.
        """
        source = iter(videos)
        running: dict[Future[VideoReward], str] = {}
        with ThreadPoolExecutor(check_concurrency(concurrency), "score") as threads:
            try:
                while True:
                    for video in islice(source, concurrency + 1 - len(running)):
                        running[threads.submit(self._score_one, video, options)] = video.video_id
                    if not running:
                        return
                    for scored in wait(running, return_when=FIRST_COMPLETED).done:
                        error = scored.exception()
                        if error is not None and not isinstance(error, LikenessError):
                            raise error
                        yield running.pop(scored), scored.result() if error is None else error
            finally:
                threads.shutdown(cancel_futures=True)

    def _score_one(self, video: VideoToScore, options: ScoreOptions | None) -> VideoReward:
        return self.score(video.frames_rgb, video.identity, options, reference_motion=video.reference_motion)


class EmbeddedScorer(FaceScorer):
    """A FaceScorer whose networks run in this process."""

    pack: Pack

    def __init__(
        self,
        pack_dir: Path | str,
        *,
        detector_size: tuple[int, int] | None = None,
        letterbox: LetterboxKind | None = None,
        threads: int = 1,
        provider: Provider = "cpu",
    ) -> None:
        """Loads the pack in a folder. `detector_size` (width, height) and `letterbox` override the pack's.

        Raises InvalidPack or ProviderUnavailable.
        """
        pack = load_pack(Path(pack_dir), detector_size=detector_size, letterbox=letterbox)
        recognizer = pack.recognizer_config
        detector_session = OnnxRuntimeSession(
            pack.detector.path, mean=INPUT_MEAN, std=INPUT_STD, threads=threads, provider=provider
        )
        recognizer_session = OnnxRuntimeSession(
            pack.recognizer.path,
            mean=recognizer.input_mean,
            std=recognizer.input_std,
            threads=threads,
            provider=provider,
        )
        super().__init__(pack, detector_session, recognizer_session, detector_session.provider)
        self._threads: int = threads
        self._provider: Provider = provider

    @cached_property
    def gradient_source(self) -> Callable[[], RecognizerGradient] | str:
        """The recognizer's graph differentiated as ONNX, or by torch where an operator has no rule for that."""
        missing = why_not_differentiable(self.pack)
        if missing is None:
            return partial(OnnxRecognizerGradient, self.pack, threads=self._threads, provider=self._provider)
        if has_gradients_extra():
            return partial(load_torch_gradient, self.pack, "cuda" if self._provider == "cuda" else "cpu")
        return f"{missing}; the extra likeness-reward[gradients] differentiates by torch, which knows more operators"


def load_torch_gradient(pack: Pack, device: str) -> RecognizerGradient:
    """Returns the recognizer of a pack differentiated by torch, which is imported here. Raises InvalidPack."""
    from likeness_reward.inference.torch_gradients import TorchRecognizerGradient

    batched = pack.recognizer.input.shape[0] is None
    return TorchRecognizerGradient(pack.recognizer.path, pack.recognizer_config, batched=batched, device=device)


def check_frames(frames_rgb: NDArray[np.uint8], what: str) -> NDArray[np.uint8]:
    """Returns the frames, in C order. Raises InvalidVideo unless they are uint8 [T, H, W, 3], T > 0, sides > 1."""
    good_shape = frames_rgb.ndim == 4 and frames_rgb.shape[3] == 3 and frames_rgb.shape[0] > 0
    if not good_shape or min(frames_rgb.shape[1:3]) < 2 or frames_rgb.dtype != np.uint8:
        found = f"{frames_rgb.dtype} {list(frames_rgb.shape)}"
        raise InvalidVideo(f"{what}: expected uint8 [T, H, W, 3] with T > 0, found {found}", found=found)
    return np.ascontiguousarray(frames_rgb)
