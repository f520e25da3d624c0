"""The networks behind a server: in its own process or in Triton, and whether they answer."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from likeness_reward.embedded import EmbeddedScorer, FaceScorer
from likeness_reward.errors import InvalidRepository, LikenessError
from likeness_reward.settings import ServerSettings

if TYPE_CHECKING:
    from likeness_reward.triton_scorer import TritonScorer

logger = logging.getLogger(__name__)


def open_backend(settings: ServerSettings) -> FaceScorer:
    """Returns the scorer that the settings ask for.

    Raises InvalidPack, ProviderUnavailable, InferenceServerUnavailable, InvalidRepository or FingerprintMismatch.
    """
    scorer = open_triton(settings) if settings.backend == "triton" else open_embedded(settings)
    if not scorer.has_crop_gradients:
        logger.info("the reward is served without gradients: %s", scorer.gradient_source)
    return scorer


def open_embedded(settings: ServerSettings) -> EmbeddedScorer:
    """Returns a scorer whose networks run in this process."""
    assert settings.pack is not None  # the settings have checked it
    return EmbeddedScorer(
        settings.pack,
        detector_size=settings.detector_size,
        letterbox=settings.letterbox,
        threads=settings.threads,
        provider=settings.provider,
    )


def open_triton(settings: ServerSettings) -> "TritonScorer":
    """Returns a scorer whose networks run in Triton, the models checked against what the settings expect."""
    from likeness_reward.triton_scorer import TritonScorer

    assert settings.triton_url is not None  # the settings have checked it
    scorer = TritonScorer(
        settings.triton_url,
        shared_memory=settings.triton_shared_memory,
        timeout_s=settings.triton_timeout_s,
        start_timeout_s=settings.triton_start_timeout_s,
    )
    means = "shared memory" if scorer.connection.shares_memory else "messages"
    logger.info("the networks run in Triton at %s; images go there in %s", settings.triton_url, means)
    try:
        check_models(scorer, settings)
    except LikenessError:
        scorer.connection.close()
        raise
    return scorer


def check_models(scorer: "TritonScorer", settings: ServerSettings) -> None:
    """Raises InvalidRepository or FingerprintMismatch unless Triton's models are what the settings expect."""
    size, letterbox = scorer.pack.detector_config.size, scorer.pack.detector_config.letterbox
    if settings.detector_size is not None and settings.detector_size != size:
        raise InvalidRepository(
            f"Triton's detector takes {size[0]}x{size[1]}; the detector size asked for is "
            f"{settings.detector_size[0]}x{settings.detector_size[1]}: export the pack again"
        )
    if settings.letterbox is not None and settings.letterbox != letterbox:
        raise InvalidRepository(
            f"Triton's detector was exported with letterbox {letterbox}; {settings.letterbox} is asked for: export the "
            "pack again"
        )
    if settings.pack is not None:
        scorer.check_pack(settings.pack, settings.detector_size, settings.letterbox)


async def follow_backend(
    scorer: FaceScorer, settings: ServerSettings, set_ready: Callable[[bool], Awaitable[None]]
) -> None:
    """Tells `set_ready` whenever the networks stop or start to answer; networks in this process always do."""
    if settings.backend != "triton":
        return
    from likeness_reward.triton_scorer import TritonScorer

    assert isinstance(scorer, TritonScorer)
    ready = True
    while True:
        await asyncio.sleep(settings.triton_probe_interval_s)
        try:
            await asyncio.to_thread(scorer.check_ready, settings.triton_probe_interval_s)
            problem = None
        except LikenessError as error:
            problem = error.message
        if ready == (problem is None):
            continue
        ready = problem is None
        logger.warning("ready again" if ready else f"not ready: {problem}")
        await set_ready(ready)
