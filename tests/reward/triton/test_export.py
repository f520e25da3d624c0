"""`pack export-triton`: what it writes, that batches give the numbers of single images, and what it refuses."""

import errno
import sys
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
import onnx
import onnxruntime
import pytest
from google.protobuf import text_format
from onnx import helper
from tritonclient.grpc import model_config_pb2

from likeness_reward import cli
from likeness_reward.errors import InvalidPack, InvalidRepository
from likeness_reward.pack import triton_repository
from likeness_reward.pack.batching import batched_detector, batched_recognizer
from likeness_reward.pack.pack import load_pack
from likeness_reward.pack.triton_repository import ExportOptions, export_repository


def config_in(repository: Path, model: str) -> model_config_pb2.ModelConfig:
    """Returns a model's config.pbtxt."""
    return text_format.Parse((repository / model / "config.pbtxt").read_text(), model_config_pb2.ModelConfig())


def run(model: bytes, images: np.ndarray) -> list[np.ndarray]:
    """Returns the outputs of an exported network on one thread."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(model, options).run(None, {"images_rgb": images})


def test_the_repository_is_complete(export_pack: Callable[..., Path], written_pack: Path, tmp_path: Path) -> None:
    repository = export_pack(
        written_pack, tmp_path / "models", letterbox="full", runtime="onnxruntime", max_batch=12, instances=2
    )
    files = sorted(str(path.relative_to(repository)) for path in repository.rglob("*") if path.is_file())
    assert files == [
        "face_detector/1/model.onnx", "face_detector/config.pbtxt",
        "face_recognizer/1/model.onnx", "face_recognizer/config.pbtxt",
    ]  # fmt: skip
    config = config_in(repository, "face_detector")
    assert (config.platform, config.max_batch_size) == ("onnxruntime_onnx", 12)
    assert [(each.name, each.data_type, list(each.dims)) for each in config.input] == [
        ("images_rgb", model_config_pb2.TYPE_UINT8, [64, 64, 3])
    ]
    # 64x64 at strides 8, 16, 32 has 64, 16, 4 cells with two anchors each.
    assert {each.name: list(each.dims) for each in config.output} == {
        "scores_8": [128, 1], "scores_16": [32, 1], "scores_32": [8, 1],
        "boxes_8": [128, 4], "boxes_16": [32, 4], "boxes_32": [8, 4],
        "landmarks_8": [128, 10], "landmarks_16": [32, 10], "landmarks_32": [8, 10],
    }  # fmt: skip
    assert [(group.kind, group.count) for group in config.instance_group] == [
        (model_config_pb2.ModelInstanceGroup.KIND_CPU, 2)
    ]
    assert list(config.dynamic_batching.preferred_batch_size) == [2, 4, 8, 12]
    assert not config.dynamic_batching.HasField("default_queue_policy")  # it adds stalls
    assert [(each.batch_size, each.inputs["images_rgb"].zero_data) for each in config.model_warmup] == [
        (1, True), (12, True)
    ]  # fmt: skip
    assert config.parameters["pack_name"].string_value == "written"
    assert [list(each.dims) for each in config_in(repository, "face_recognizer").output] == [[4]]


def test_the_letterbox_fit_leaves_the_sides_of_images_free(
    export_pack: Callable[..., Path], written_pack: Path, tmp_path: Path
) -> None:
    repository = export_pack(written_pack, tmp_path / "models", runtime="onnxruntime", max_batch=12)
    config = config_in(repository, "face_detector")
    assert list(config.input[0].dims) == [-1, -1, 3]
    assert {each.name: list(each.dims) for each in config.output if each.name.endswith("_8")} == {
        "scores_8": [-1, 1], "boxes_8": [-1, 4], "landmarks_8": [-1, 10]
    }  # fmt: skip
    # The least canvas, 32x32, and the greatest.
    assert [(each.batch_size, list(each.inputs["images_rgb"].dims)) for each in config.model_warmup] == [
        (1, [32, 32, 3]), (12, [64, 64, 3])
    ]  # fmt: skip
    assert list(config_in(repository, "face_recognizer").input[0].dims) == [112, 112, 3]


def test_both_runtimes_have_the_same_models_inputs_and_outputs(
    export_pack: Callable[..., Path], written_pack: Path, tmp_path: Path
) -> None:
    onnx_models = export_pack(written_pack, tmp_path / "a", runtime="onnxruntime")
    python_models = export_pack(written_pack, tmp_path / "b", runtime="python")
    for model in ("face_detector", "face_recognizer"):
        ours, other = config_in(onnx_models, model), config_in(python_models, model)
        assert (ours.name, list(ours.input), list(ours.output)) == (other.name, list(other.input), list(other.output))
        assert (other.backend, other.platform) == ("python", "")
        network = Path(model) / "1" / "model.onnx"
        assert (onnx_models / network).read_bytes() == (python_models / network).read_bytes()
        assert (python_models / model / "1" / "model.py").exists()


def test_cuda_with_tensorrt_is_asked_for_in_the_configuration(
    export_pack: Callable[..., Path], written_pack: Path, tmp_path: Path
) -> None:
    repository = export_pack(
        written_pack, tmp_path / "models", runtime="onnxruntime", device="cuda", tensorrt=True, precision="fp16"
    )
    config = config_in(repository, "face_recognizer")
    assert config.instance_group[0].kind == model_config_pb2.ModelInstanceGroup.KIND_GPU
    (accelerator,) = config.optimization.execution_accelerators.gpu_execution_accelerator
    assert (accelerator.name, accelerator.parameters["precision_mode"]) == ("tensorrt", "FP16")
    assert "intra_op_thread_count" not in config.parameters


@pytest.mark.parametrize("source", ["real_pack", "toy_pack", "written_pack"])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_batch_gives_the_numbers_of_single_images_to_the_last_bit(
    source: str, count: int, request: pytest.FixtureRequest
) -> None:
    pack = load_pack(request.getfixturevalue(source), detector_size=(128, 96))
    images = np.random.default_rng(count).integers(0, 256, (count, 96, 128, 3), np.uint8)
    original = onnxruntime.InferenceSession(str(pack.detector.path))
    found = run(batched_detector(pack).model, images)
    assert found[0].shape == (count, 16 * 12 * 2, 1)
    for index, image in enumerate(images):
        blob = cv2.dnn.blobFromImages([image], 1 / 128, mean=(127.5,) * 3)
        for batched, single in zip(found, original.run(None, {pack.detector.input.name: blob}), strict=True):
            np.testing.assert_array_equal(batched[index], single)


def test_a_recognizer_that_normalises_itself_gets_the_pixels_as_they_are(written_pack: Path, onnx_writer) -> None:
    onnx_writer.recognizer(written_pack / "recognizer.onnx", normalises=True)
    images = np.full((2, 112, 112, 3), (10, 20, 30), np.uint8)
    (embeddings,) = run(batched_recognizer(load_pack(written_pack)).model, images)
    np.testing.assert_allclose(embeddings, [[10.5, 20.5, 30.5, 0.5]] * 2)  # the mean colour + 0.5


def test_fp16_is_close_and_has_a_fingerprint_of_its_own(real_pack: Path, tmp_path: Path) -> None:
    pack = load_pack(real_pack, detector_size=(128, 128))
    crops = np.random.default_rng(0).integers(0, 256, (4, 112, 112, 3), np.uint8)
    (full,), (half,) = (run(batched_recognizer(pack, precision).model, crops) for precision in ("fp32", "fp16"))
    assert not np.array_equal(full, half)
    cosines = (full * half).sum(1) / np.linalg.norm(full, axis=1) / np.linalg.norm(half, axis=1)
    assert cosines.min() > 0.9999
    exported = [
        export_repository(pack, tmp_path / precision, ExportOptions(precision=precision)).fingerprint
        for precision in ("fp32", "fp16")
    ]
    assert exported[0] == pack.fingerprint
    assert exported[1] != pack.fingerprint


def test_a_detector_of_another_form_is_refused_by_what_it_ends_in(written_pack: Path, tmp_path: Path) -> None:
    path = written_pack / "detector.onnx"
    model = onnx.load(path)
    transpose = next(node for node in model.graph.node if node.output[0] == "box_16_cells")
    transpose.attribute[0].ints[:] = [0, 1, 2, 3]
    onnx.save(model, path)
    with pytest.raises(
        InvalidPack, match=r"detector.onnx: output box_16 .* Reshape <- Transpose with permutation \[0, 1"
    ):
        export_repository(load_pack(written_pack), tmp_path / "models", ExportOptions())
    assert not (tmp_path / "models").exists()


def test_a_network_that_mixes_the_images_of_a_batch_is_refused(written_pack: Path, tmp_path: Path) -> None:
    path = written_pack / "detector.onnx"
    model = onnx.load(path)
    for node in model.graph.node:
        node.input[:] = ["centred" if name == "image" else name for name in node.input]
    model.graph.node.insert(0, helper.make_node("ReduceMean", ["image"], ["mean"], axes=[0], keepdims=1))
    model.graph.node.insert(1, helper.make_node("Sub", ["image", "mean"], ["centred"]))
    onnx.save(model, path)
    with pytest.raises(InvalidPack, match=r"output 0 of a batch differs by .* at most 0.0001 is allowed"):
        export_repository(load_pack(written_pack), tmp_path / "models", ExportOptions())
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["written"]


def test_a_full_disk_half_way_leaves_nothing_behind(
    written_pack: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model = triton_repository.write_model

    def disk_full_at_the_second(folder: Path, *arguments: object) -> None:
        if folder.name == "face_recognizer":
            raise OSError(errno.ENOSPC, "No space left on device")
        write_model(folder, *arguments)

    monkeypatch.setattr(triton_repository, "write_model", disk_full_at_the_second)
    with pytest.raises(InvalidRepository, match="cannot write .*models: No space left on device"):
        export_repository(load_pack(written_pack), tmp_path / "models", ExportOptions())
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["written"]


def test_an_existing_repository_is_never_touched(written_pack: Path, tmp_path: Path) -> None:
    target = tmp_path / "models"
    target.mkdir()
    (target / "mine").write_text("kept")
    with pytest.raises(InvalidRepository, match="models exists; name a new or an empty folder"):
        export_repository(load_pack(written_pack), target, ExportOptions())
    assert [entry.name for entry in target.iterdir()] == ["mine"]
    with pytest.raises(InvalidRepository, match="nowhere is no folder"):
        export_repository(load_pack(written_pack), tmp_path / "nowhere" / "models", ExportOptions())


def test_an_empty_folder_is_filled(written_pack: Path, tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    export_repository(load_pack(written_pack), tmp_path / "models", ExportOptions())
    assert (tmp_path / "models" / "face_detector" / "config.pbtxt").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensorrt": True}, "TensorRT was asked for with device cpu and runtime onnxruntime"),
        ({"tensorrt": True, "device": "cuda", "runtime": "python"}, "with device cuda and runtime python"),
        ({"max_batch": 0}, "max_batch is 0; at least 1 is allowed"),
    ],
)
def test_options_that_do_not_fit_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidRepository, match=message):
        ExportOptions(**options)


def test_the_command_says_what_it_wrote(
    written_pack: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["pack", "export-triton", str(written_pack), str(tmp_path / "models"), "--max-batch", "4"]
    monkeypatch.setattr(sys, "argv", ["likeness-reward", *arguments])
    for code in (0, 1):  # the second time the folder is there
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert ended.value.code == code
    printed = capsys.readouterr()
    assert "face_detector, from detector.onnx" in printed.out
    assert "largest difference 0.0e+00" in printed.out
    assert load_pack(written_pack).fingerprint in printed.out
    assert "models exists" in printed.err


def test_gradients_are_a_third_model(export_pack: Callable[..., Path], written_pack: Path, tmp_path: Path) -> None:
    repository = export_pack(written_pack, tmp_path / "models", runtime="onnxruntime", max_batch=4, gradients=True)
    config, recognizer = (config_in(repository, model) for model in ("face_gradient", "face_recognizer"))
    assert [(each.name, each.data_type, list(each.dims)) for each in config.input] == [
        ("images_rgb", model_config_pb2.TYPE_UINT8, [112, 112, 3]),
        ("templates", model_config_pb2.TYPE_FP32, [4]),
    ]
    assert {each.name: list(each.dims) for each in config.output} == {
        "similarities": [1], "gradients": [3, 112, 112],
    }  # fmt: skip
    assert config.parameters["network_hash"] == recognizer.parameters["network_hash"]
    assert set(config.model_warmup[0].inputs) == {"images_rgb", "templates"}


def test_gradients_are_those_of_full_precision_only(
    export_pack: Callable[..., Path], written_pack: Path, tmp_path: Path
) -> None:
    with pytest.raises(InvalidRepository, match="gradients were asked for with precision fp16"):
        export_pack(written_pack, tmp_path / "models", precision="fp16", gradients=True)
    repository = export_pack(
        written_pack, tmp_path / "models", runtime="onnxruntime", device="cuda", tensorrt=True, gradients=True
    )
    assert not config_in(repository, "face_gradient").HasField("optimization")
    assert config_in(repository, "face_recognizer").HasField("optimization")


def test_a_recognizer_without_a_derivative_writes_nothing(
    export_pack: Callable[..., Path], written_pack: Path, onnx_writer, tmp_path: Path
) -> None:
    onnx_writer.recognizer(written_pack / "recognizer.onnx", last="Tanh")
    with pytest.raises(InvalidPack, match="recognizer.onnx cannot be differentiated: .*Tanh"):
        export_pack(written_pack, tmp_path / "models", gradients=True)
    assert not (tmp_path / "models").exists()
