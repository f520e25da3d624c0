"""Networks whose answers can be worked out by hand, servers on free ports, and the packs for parity tests.

A frame of a test is one colour, `colour_frame(red, green, blue)`:
  red >= 192  the detector sees one face, `FACE_BOX` of a 64x64 canvas, with ArcFace's own landmarks scaled into it;
  green       the recognizer's embedding is (cos a, sin a, 0, 0) with a = green / 255 * 90 degrees;
  blue >= 192 the recognizer's embedding is NaN.
So the similarity of frames with greens g and h is cos((g - h) / 255 * 90 degrees).
"""

import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from server_thread import ServerThread

from likeness_reward.client import RewardClient
from likeness_reward.domain import IdentityTemplate
from likeness_reward.embedded import FaceScorer
from likeness_reward.errors import InferenceFailed
from likeness_reward.face.alignment import CROP_LANDMARKS
from likeness_reward.face.detector import DetectorConfig
from likeness_reward.face.recognizer import RecognizerConfig
from likeness_reward.inference.session import TensorSpec
from likeness_reward.pack.pack import Network, Pack
from likeness_reward.settings import ServerSettings

REPOSITORY = Path(__file__).resolve().parents[2]
CANVAS = 64
FACE_BOX = (16.0, 16.0, 48.0, 48.0)
LANDMARKS = CROP_LANDMARKS / 112 * 32 + 16
FINGERPRINT = "f" * 64


def colour_frame(
    red: int = 255, green: int = 0, blue: int = 0, width: int = CANVAS, height: int = CANVAS
) -> np.ndarray:
    """Returns a frame uint8 [H, W, 3] of one colour."""
    return np.full((height, width, 3), (red, green, blue), np.uint8)


def similarity_of(first_green: int, second_green: int) -> float:
    """Returns the cosine that the networks below give two faces of these greens."""
    return math.cos((first_green - second_green) / 255 * math.pi / 2)


class ColourDetector:
    """An SCRFD by hand: anchor 0 of stride 8, cell (4, 4) with centre (32, 32), reports the face."""

    def __init__(self) -> None:
        self.input = TensorSpec("image", (None, None, None, 3))
        self.outputs = tuple(
            TensorSpec(f"{kind}_{stride}", (None, None, columns))
            for kind, columns in (("score", 1), ("box", 4), ("landmarks", 10))
            for stride in (8, 16, 32)
        )
        self.batch_sizes: list[int] = []

    def run(self, images: np.ndarray) -> list[np.ndarray]:
        """Returns all nine outputs."""
        self.batch_sizes.append(len(images))
        height, width = images.shape[1:3]
        outputs = [
            np.zeros((len(images), height // stride * (width // stride) * 2, columns), np.float32)
            for columns in (1, 4, 10)
            for stride in (8, 16, 32)
        ]
        anchor = (4 * (width // 8) + 4) * 2
        for index, image in enumerate(images):
            if image[0, 0, 0] >= 192:
                outputs[0][index, anchor] = 0.9
                outputs[3][index, anchor] = np.array([16, 16, 16, 16]) / 8
                outputs[6][index, anchor] = (LANDMARKS - 32).ravel() / 8
        return outputs


class ColourRecognizer:
    """An ArcFace by hand: the middle pixel's green is the angle of the embedding."""

    def __init__(self) -> None:
        self.input = TensorSpec("crop", (None, 112, 112, 3))
        self.outputs = (TensorSpec("embedding", (None, 4)),)
        self.before_run: Callable[[], None] = lambda: None

    def run(self, images: np.ndarray) -> list[np.ndarray]:
        """Returns embeddings [N, 4] of length 3."""
        self.before_run()
        middle = images[:, 56, 56].astype(np.float64)
        angle = middle[:, 1] / 255 * (math.pi / 2)
        raw = 3 * np.stack([np.cos(angle), np.sin(angle), 0 * angle, 0 * angle], axis=1)
        raw[middle[:, 2] >= 192] = np.nan
        return [raw.astype(np.float32)]


class FailingDetector(ColourDetector):
    """A detector that fails on every frame."""

    def run(self, images: np.ndarray) -> list[np.ndarray]:
        """Raises InferenceFailed."""
        raise InferenceFailed("the detector broke")


def colour_scorer(detector: ColourDetector | None = None, recognizer: ColourRecognizer | None = None) -> FaceScorer:
    """Returns a scorer on the two networks above."""
    detector, recognizer = detector or ColourDetector(), recognizer or ColourRecognizer()
    det = Network(Path("detector.onnx"), "detector", detector.input, detector.outputs, False)
    rec = Network(Path("recognizer.onnx"), "recognizer", recognizer.input, recognizer.outputs, False)
    pack = Pack(
        name="colours",
        directory=Path(),
        networks=(det, rec),
        detector=det,
        recognizer=rec,
        detector_config=DetectorConfig(size=(CANVAS, CANVAS), close_up_pass=False),
        recognizer_config=RecognizerConfig(),
        fingerprint=FINGERPRINT,
    )
    return FaceScorer(pack, detector, recognizer)


def colour_identity(green: int = 0) -> IdentityTemplate:
    """Returns the identity of a face of this green."""
    angle = green / 255 * math.pi / 2
    return IdentityTemplate(np.array([math.cos(angle), math.sin(angle), 0, 0], np.float32), FINGERPRINT, 1)


@pytest.fixture
def serve() -> Iterator[Callable[..., ServerThread]]:
    """Starts servers: serve(scorer=None, **settings)."""
    running: list[ServerThread] = []

    def start(scorer: FaceScorer | None = None, **settings: object) -> ServerThread:
        chosen = {"pack": Path(), "port": 0, "drain_timeout_s": 5.0} | settings
        running.append(ServerThread(scorer or colour_scorer(), ServerSettings(**chosen)))
        return running[-1]

    yield start
    for server in running:
        if server.loop.is_running():
            server.stop()


@pytest.fixture
def client(serve: Callable[..., ServerThread]) -> Iterator[RewardClient]:
    """A client of a server on the two networks above."""
    with RewardClient(serve().endpoint, timeout_s=20) as connected:
        yield connected


@pytest.fixture
def colours() -> object:
    """The words of this file, for tests: colours.frame, colours.identity, colours.similarity, ..."""

    class Colours:
        frame = staticmethod(colour_frame)
        identity = staticmethod(colour_identity)
        similarity = staticmethod(similarity_of)
        scorer = staticmethod(colour_scorer)
        Detector, Recognizer, FailingDetector = ColourDetector, ColourRecognizer, FailingDetector
        fingerprint = FINGERPRINT
        box, landmarks, canvas = FACE_BOX, LANDMARKS, CANVAS

    return Colours


def save_network(path: Path, nodes: list, inputs: list, outputs: list, weights: dict[str, np.ndarray]) -> None:
    """Writes an ONNX file from nodes, (name, shape) of inputs and outputs, and weights by name."""
    graph = helper.make_graph(
        nodes,
        path.stem,
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in inputs],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in outputs],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    onnx.checker.check_model(model)
    onnx.save(model, str(path))


def write_detector(path: Path, *, output_count: int = 9, box_columns: int = 4, seed: int = 0) -> None:
    """Writes an SCRFD in InsightFace's form: a face of 4 strides wherever a cell's mean red is over 0.5 * 128."""
    nodes, outputs, weights = [], [], {}
    for kind, columns in (("score", 1), ("box", box_columns), ("landmarks", 10)):
        for stride in (8, 16, 32):
            name = f"{kind}_{stride}"
            kernel = np.zeros((2 * columns, 3, stride, stride), np.float32)
            bias = np.full(2 * columns, 2.0, np.float32)
            if kind == "score":
                kernel[0, 0], bias[:] = 1 / stride**2, [0.0, float(-seed)]
            elif kind == "landmarks":
                bias[:] = np.tile((CROP_LANDMARKS / 112 * 4 - 2).ravel(), 2)
            weights |= {f"{name}_w": kernel, f"{name}_b": bias, f"{name}_shape": np.array([-1, columns], np.int64)}
            conv = ["image", f"{name}_w", f"{name}_b"]
            nodes += [
                helper.make_node("Conv", conv, [f"{name}_map"], strides=[stride] * 2, kernel_shape=[stride] * 2),
                helper.make_node("Transpose", [f"{name}_map"], [f"{name}_cells"], perm=[0, 2, 3, 1]),
                helper.make_node("Reshape", [f"{name}_cells", f"{name}_shape"], [name]),
            ]
            outputs.append((name, [None, columns]))
    save_network(path, nodes, [("image", [1, 3, None, None])], outputs[:output_count], weights)


def write_recognizer(
    path: Path, *, side: int = 112, length: int = 4, normalises: bool = False, last: str = "Identity"
) -> None:
    """Writes an ArcFace whose embedding is a fixed projection of the mean colour, plus a bias, through an operator."""
    matrix = np.eye(3, length, dtype=np.float32)
    weights = {"matrix": matrix, "bias": np.full(length, 0.5, np.float32), "zero": np.float32(0), "one": np.float32(1)}
    nodes = [
        helper.make_node("GlobalAveragePool", ["scaled" if normalises else "crop"], ["mean"]),
        helper.make_node("Flatten", ["mean"], ["flat"]),
        helper.make_node("MatMul", ["flat", "matrix"], ["projected"]),
        helper.make_node("Add", ["projected", "bias"], ["sum"]),
        helper.make_node(last, ["sum"], ["embedding"], name="last"),
    ]
    if normalises:
        nodes.insert(0, helper.make_node("Sub", ["crop", "zero"], ["shifted"], name="Sub_0"))
        nodes.insert(1, helper.make_node("Mul", ["shifted", "one"], ["scaled"], name="Mul_1"))
    save_network(path, nodes, [("crop", [None, 3, side, side])], [("embedding", [None, length])], weights)


@pytest.fixture
def written_pack(tmp_path: Path) -> Path:
    """A folder with a detector and a recognizer small enough to be written in a moment; pack.json says 64x64."""
    folder = tmp_path / "written"
    folder.mkdir()
    write_detector(folder / "detector.onnx")
    write_recognizer(folder / "recognizer.onnx")
    (folder / "pack.json").write_text('{"name": "written", "detector_size": [64, 64]}')
    return folder


@pytest.fixture
def onnx_writer() -> object:
    """write_detector and write_recognizer, for tests that want them wrong."""

    class Writer:
        detector = staticmethod(write_detector)
        recognizer = staticmethod(write_recognizer)

    return Writer


@pytest.fixture(scope="session")
def real_pack() -> Path:
    """A real SCRFD and MobileFaceNet: LIKENESS_REAL_PACK, else a folder beside the repository."""
    folder = Path(os.environ.get("LIKENESS_REAL_PACK", REPOSITORY.parent / "shared" / "face_pack"))
    if not any(folder.glob("*.onnx")):
        pytest.skip(f"no real face pack in {folder}: set LIKENESS_REAL_PACK")
    return folder


@pytest.fixture(scope="session")
def toy_pack() -> Path:
    """The toy world's face pack."""
    toyworld = pytest.importorskip("likeness_toyworld", reason="likeness-toyworld is not installed")
    folder = Path(toyworld.face_pack_path())
    if not any(folder.glob("*.onnx")):
        pytest.skip("the toy world's face pack is not built yet")
    return folder
