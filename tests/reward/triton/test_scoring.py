"""Networks in the real Triton give the rewards of networks in this process."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from tritonclient.grpc import InferenceServerClient

from likeness_reward.client import RewardClient
from likeness_reward.embedded import EmbeddedScorer
from likeness_reward.errors import FingerprintMismatch, InferenceServerUnavailable, InvalidRepository
from likeness_reward.face.detector import fitted_canvas
from likeness_reward.triton_scorer import TritonScorer

SIZE = (320, 320)
MAX_BATCH = 5


@pytest.fixture(scope="module")
def models(export_pack: Callable[..., Path], real_pack: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real pack as a model repository; batches are smaller than the service's own."""
    return export_pack(real_pack, tmp_path_factory.mktemp("models") / "repository", SIZE, max_batch=MAX_BATCH)


@pytest.fixture(scope="module")
def triton(start_triton: Callable, models: Path):
    """A Triton that serves it."""
    return start_triton(models)


@pytest.fixture(scope="module")
def embedded(real_pack: Path) -> EmbeddedScorer:
    """The same pack in this process."""
    return EmbeddedScorer(real_pack, detector_size=SIZE)


@pytest.fixture(params=["on", "off"])
def scorer(triton, request: pytest.FixtureRequest) -> Iterator[TritonScorer]:
    """A scorer on Triton, with and without shared memory."""
    connected = TritonScorer(triton.url, shared_memory=request.param)
    assert connected.connection.shares_memory == (request.param == "on")
    yield connected
    connected.connection.close()


@pytest.fixture(scope="module")
def frames() -> np.ndarray:
    """Twelve frames with six, one or no people."""
    insightface = pytest.importorskip("insightface")
    import cv2

    photo = cv2.imread(str(Path(insightface.__file__).parent / "data" / "images" / "t1.jpg"))[..., ::-1]
    moved = [np.roll(photo, 9 * shift, axis=1) for shift in range(9)]
    return np.ascontiguousarray([*moved, photo[:, ::-1], np.zeros_like(photo), np.full_like(photo, 90)])


def test_rewards_equal_the_embedded_ones_to_the_last_bit(
    scorer: TritonScorer, embedded: EmbeddedScorer, frames: np.ndarray
) -> None:
    assert scorer.model_fingerprint == embedded.model_fingerprint
    expected_identity, identity = embedded.embed_identity([frames[0]]), scorer.embed_identity([frames[0]])
    np.testing.assert_array_equal(identity.embedding, expected_identity.embedding)
    expected, found = embedded.score(frames, expected_identity), scorer.score(frames, identity)
    assert found.similarities == expected.similarities
    assert found.value == expected.value
    assert expected.embedded_frame_count == 10
    for reference, frame in zip(expected.frames, found.frames, strict=True):
        assert frame.observation.face_count == reference.observation.face_count
        if reference.observation.face is not None:
            np.testing.assert_array_equal(frame.observation.face.landmarks, reference.observation.face.landmarks)


def test_painted_people_have_equal_rewards_under_the_toy_pack(
    start_triton, export_pack: Callable[..., Path], toy_pack: Path, tmp_path: Path
) -> None:
    from likeness_toyworld import painter

    rng = np.random.default_rng(5)
    clips = [
        painter.paint_clip(painter.sample_identity(index), painter.sample_motion(rng), 9, 64)[0] for index in range(3)
    ]
    embedded = EmbeddedScorer(toy_pack)
    scorer = TritonScorer(start_triton(export_pack(toy_pack, tmp_path / "models")).url)
    identity = embedded.embed_identity([clips[0][0]])
    found = [scorer.score(clip, identity) for clip in clips]
    expected = [embedded.score(clip, identity) for clip in clips]
    assert [reward.similarities for reward in found] == [reward.similarities for reward in expected]
    assert all(reward.embedded_frame_count > 0 for reward in expected)
    scorer.connection.close()


def test_many_callers_get_what_one_gets(serve, scorer: TritonScorer, frames: np.ndarray) -> None:
    server = serve(scorer, workers=8)
    with RewardClient(server.endpoint, timeout_s=120) as client:
        identity = client.embed_identity([frames[0]])
        expected = [client.score(frames[index : index + 1], identity).value for index in range(4)]
        before = executions(scorer)
        with ThreadPoolExecutor(64) as callers:
            found = list(callers.map(lambda index: client.score(frames[index % 4][None], identity).value, range(64)))
    assert found == expected * 16
    # Triton joined requests that waited: fewer runs of the detector than images.
    images, runs = (after - earlier for after, earlier in zip(executions(scorer), before, strict=True))
    assert images == 64
    assert runs < images


def test_frames_of_several_shapes_at_once_give_the_embedded_rewards(
    serve, scorer: TritonScorer, embedded: EmbeddedScorer, frames: np.ndarray
) -> None:
    server = serve(scorer, workers=8)
    videos = [frames[:1], np.ascontiguousarray(frames[:1, :, 300:1100]), np.ascontiguousarray(frames[:1, :, 200:700])]
    assert [
        fitted_canvas((video.shape[2], video.shape[1]), SIZE, 32) for video in videos
    ] == [(320, 224), (320, 320), (192, 320)]  # fmt: skip
    with RewardClient(server.endpoint, timeout_s=120) as client:
        identity = client.embed_identity([frames[0]])
        expected = [client.score(video, identity).value for video in videos]
        assert len(set(expected)) == 3
        assert [embedded.score(video, identity).value for video in videos] == pytest.approx(expected, abs=1e-6)
        with ThreadPoolExecutor(24) as callers:
            found = list(callers.map(lambda index: client.score(videos[index % 3], identity).value, range(24)))
    assert found == expected * 8


def executions(scorer: TritonScorer) -> tuple[int, int]:
    """Returns how many images the detector has seen in Triton, in how many runs."""
    with InferenceServerClient(scorer.connection.url) as client:
        (statistics,) = client.get_inference_statistics("face_detector").model_stats
    return statistics.inference_count, statistics.execution_count


def test_nothing_is_left_in_shared_memory(triton, frames: np.ndarray) -> None:
    scorer = TritonScorer(triton.url, shared_memory="on")
    identity = scorer.embed_identity([frames[0]])
    with ThreadPoolExecutor(4) as callers:
        list(callers.map(lambda _: scorer.score(frames[:2], identity), range(8)))
    assert 1 <= len(regions(triton)) <= 4  # one a thread
    scorer.connection.close()
    assert regions(triton) == []
    assert list(Path("/dev/shm").glob("likeness-*")) == []


def regions(triton) -> list[str]:
    """Returns the names of this service's regions that Triton knows."""
    with InferenceServerClient(triton.url) as client:
        return [name for name in client.get_system_shared_memory_status().regions if name.startswith("likeness-")]


def test_on_another_host_bytes_are_sent_unless_shared_memory_is_demanded(
    triton, embedded: EmbeddedScorer, frames: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    register = InferenceServerClient.register_system_shared_memory

    def not_this_host(self, name: str, key: str, *arguments: object, **options: object) -> None:
        register(self, name, f"{key}-elsewhere", *arguments, **options)

    monkeypatch.setattr(InferenceServerClient, "register_system_shared_memory", not_this_host)
    scorer = TritonScorer(triton.url, shared_memory="auto")
    assert not scorer.connection.shares_memory
    assert scorer.embed_identity([frames[0]]).embedding.tolist() == (
        embedded.embed_identity([frames[0]]).embedding.tolist()
    )
    scorer.connection.close()
    with pytest.raises(
        InferenceServerUnavailable, match="no shared memory with Triton: .*Unable to open shared memory"
    ):
        TritonScorer(triton.url, shared_memory="on")
    assert list(Path("/dev/shm").glob("likeness-*")) == []


def test_models_of_another_pack_are_refused_by_both_fingerprints(triton, written_pack: Path, real_pack: Path) -> None:
    scorer = TritonScorer(triton.url)
    scorer.check_pack(real_pack, SIZE)
    with pytest.raises(FingerprintMismatch, match=f"{scorer.model_fingerprint[:12]}: export the pack again"):
        scorer.check_pack(written_pack, None)
    scorer.connection.close()


def test_models_that_export_triton_did_not_write_are_refused(
    start_triton, export_pack: Callable[..., Path], written_pack: Path, tmp_path: Path
) -> None:
    repository = export_pack(written_pack, tmp_path / "models")
    config = repository / "face_recognizer" / "config.pbtxt"
    config.write_text(config.read_text().replace('"network_hash"', '"something_else"'))
    triton = start_triton(repository)
    with pytest.raises(
        InvalidRepository, match="model face_recognizer on Triton at .*parameter network_hash is missing"
    ):
        TritonScorer(triton.url)
    triton.kill()


def test_no_triton_is_named_within_the_time_given() -> None:
    with pytest.raises(InferenceServerUnavailable, match=r"Triton at 127.0.0.1:1: no answer .* after 0.5 s"):
        TritonScorer("127.0.0.1:1", start_timeout_s=0.5)


def test_a_repository_with_instances_answers_from_all(
    start_triton, export_pack: Callable[..., Path], written_pack: Path, tmp_path: Path, colours
) -> None:
    triton = start_triton(export_pack(written_pack, tmp_path / "models", instances=2))
    scorer = TritonScorer(triton.url, shared_memory="on")
    expected = EmbeddedScorer(written_pack).embed_identity([colours.frame()])
    found: list[list[float]] = []
    threads = [
        threading.Thread(target=lambda: found.append(scorer.embed_identity([colours.frame()]).embedding.tolist()))
        for _ in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected.embedding.tolist()] * 16
    scorer.connection.close()
    triton.kill()
