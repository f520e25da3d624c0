"""Letterbox, decoding and suppression, worked out by hand."""

import numpy as np
import pytest
from pydantic import ValidationError

from likeness_reward.errors import InferenceFailed
from likeness_reward.face.detector import (
    DetectorConfig,
    FaceDetector,
    close_up_letterbox,
    decode_level,
    fitted_canvas,
    fitted_size,
    letterbox,
    suppress_overlaps,
)


@pytest.mark.parametrize(
    ("frame_size", "expected"),
    [((1280, 640), (640, 320)), ((640, 1280), (320, 640)), ((100, 33), (640, 211)), ((5000, 2), (640, 1))],
)
def test_a_frame_is_fitted_with_truncated_sides_and_never_vanishes(
    frame_size: tuple[int, int], expected: tuple[int, int]
) -> None:
    assert fitted_size(frame_size, (640, 640)) == expected


@pytest.mark.parametrize(
    ("frame_size", "step", "expected"),
    [
        ((832, 480), 32, (640, 384)),  # 640x369
        ((480, 832), 32, (384, 640)),
        ((1280, 720), 128, (640, 384)),  # 640x360
        ((1024, 768), 32, (640, 480)),  # three quarters of the canvas
        ((1000, 800), 32, (640, 640)),  # 640x512 would be four fifths
        ((640, 640), 32, (640, 640)),
        ((5000, 2), 32, (640, 32)),
    ],
)
def test_the_fitted_canvas_is_the_least_that_the_strides_allow(
    frame_size: tuple[int, int], step: int, expected: tuple[int, int]
) -> None:
    assert fitted_canvas(frame_size, (640, 640), step) == expected


class CanvasesSeen:
    """The detector of the colours, which keeps the (width, height) of every canvas; one face ends at (48, 48)."""

    def __init__(self, colours, letterbox: str = "fit", size: tuple[int, int] = (256, 256)) -> None:
        self.seen: list[tuple[int, int]] = []
        outer = self

        class Detector(colours.Detector):
            def run(self, images: np.ndarray) -> list[np.ndarray]:
                outer.seen.append((images.shape[2], images.shape[1]))
                return super().run(images)

        self.detector = FaceDetector(Detector(), DetectorConfig(size=size, letterbox=letterbox, close_up_pass=False))


@pytest.mark.parametrize(
    ("frame_size", "canvases"),
    [
        ((256, 144), [(256, 160)]),  # cut at y = 160: the face ends 112 above it
        ((256, 140), [(256, 160)]),
        ((256, 128), [(256, 128), (256, 256)]),  # 80 above the cut: the whole canvas is asked
        ((128, 256), [(128, 256), (256, 256)]),
        ((144, 256), [(160, 256)]),
        ((256, 256), [(256, 256)]),
    ],
)
def test_a_face_near_the_cut_is_looked_at_again_on_the_whole_canvas(
    colours, frame_size: tuple[int, int], canvases: list[tuple[int, int]]
) -> None:
    fit, full = CanvasesSeen(colours), CanvasesSeen(colours, "full")
    frame = colours.frame(width=frame_size[0], height=frame_size[1])
    (found,), (expected,) = fit.detector.detect([frame]), full.detector.detect([frame])
    assert fit.seen == canvases
    assert full.seen == [(256, 256)]
    assert [face.box.tolist() for face in found] == [face.box.tolist() for face in expected]
    assert len(found) == 1


def test_frames_of_several_shapes_keep_their_places_and_share_a_run_with_their_like(colours) -> None:
    fit = CanvasesSeen(colours)
    sizes = [(256, 144), (144, 256), (256, 150), (256, 144)]
    frames = [
        colours.frame(width=width, height=height, red=red)
        for (width, height), red in zip(sizes, (255, 0, 0, 255), strict=True)
    ]
    assert [len(faces) for faces in fit.detector.detect(frames)] == [1, 0, 0, 1]
    assert fit.seen == [(256, 160), (160, 256)]


def test_what_is_perhaps_a_face_near_the_cut_is_decided_on_the_whole_canvas(colours) -> None:
    class SurerOnTheWholeCanvas(colours.Detector):
        def run(self, images: np.ndarray) -> list[np.ndarray]:
            outputs = super().run(images)
            outputs[0][outputs[0] > 0] = 0.55 if images.shape[1] == 256 else 0.45
            return outputs

    frame, config = colours.frame(width=256, height=128), DetectorConfig(size=(256, 256))
    (faces,) = FaceDetector(SurerOnTheWholeCanvas(), config).first_pass([frame])
    assert [face.score for face in faces] == pytest.approx([0.55])


def test_letterbox_fills_the_top_left_and_leaves_the_rest_black() -> None:
    box = letterbox(np.full((50, 100, 3), 200, np.uint8), (64, 64))
    assert (box.scale, box.offset) == (0.64, (0, 0))
    assert (box.canvas[:32] == 200).all()
    assert (box.canvas[32:] == 0).all()


def test_close_up_has_half_the_scale_and_black_on_every_side() -> None:
    box = close_up_letterbox(np.full((64, 64, 3), 200, np.uint8), (128, 128))
    assert (box.scale, box.offset) == (1.0, (32, 32))
    assert (box.canvas[32:96, 32:96] == 200).all()
    assert box.canvas.sum() == 200 * 64 * 64 * 3


def test_one_anchor_is_decoded_from_its_cell_in_strides() -> None:
    scores, boxes, landmarks = (np.zeros((3 * 2 * 2, columns), np.float32) for columns in (1, 4, 10))
    anchor = (1 * 3 + 2) * 2 + 1  # row 1, column 2, second anchor: centre (16, 8) at stride 8
    scores[anchor], boxes[anchor], landmarks[anchor] = 0.5, [1, 0.5, 2, 1], np.arange(10)
    found = decode_level((3, 2, 8), (scores, boxes, landmarks), anchors=2, threshold=0.5)
    assert found[0].tolist() == [0.5]
    assert found[1].tolist() == [[16 - 8, 8 - 4, 16 + 16, 8 + 8]]
    assert found[2][0, 1].tolist() == [16 + 2 * 8, 8 + 3 * 8]


def test_a_score_just_below_the_threshold_is_no_face() -> None:
    scores, boxes, landmarks = (np.zeros((2, columns), np.float32) for columns in (1, 4, 10))
    scores[0] = 0.4999
    assert len(decode_level((1, 1, 8), (scores, boxes, landmarks), 2, 0.5)[0]) == 0


def test_suppression_counts_end_pixels_and_keeps_what_overlaps_just_enough() -> None:
    # 10x10 boxes of 0..9; the second is shifted by 4: shared 6 * 10, union 140, 0.4286; by 5: 50 / 150 = 0.3333.
    boxes = np.array([[0, 0, 9, 9], [4, 0, 13, 9], [5, 0, 14, 9]], np.float32)
    assert suppress_overlaps(boxes[:2], 0.4) == [0]
    assert suppress_overlaps(boxes[[0, 2]], 0.4) == [0, 1]


def test_a_batch_gives_what_one_by_one_gives(colours) -> None:
    frames = [colours.frame(red) for red in (255, 0, 255, 191, 192)] * 3
    config = DetectorConfig(size=(64, 64), close_up_pass=False)
    network = colours.Detector()
    together = FaceDetector(network, config).detect(frames)
    assert network.batch_sizes == [8, 7]
    assert [len(faces) for faces in together] == [1, 0, 1, 0, 1] * 3
    one_by_one = [FaceDetector(colours.Detector(), config).detect([frame])[0] for frame in frames]
    for faces, alone in zip(together, one_by_one, strict=True):
        assert [face.box.tolist() for face in faces] == [face.box.tolist() for face in alone]


def test_boxes_and_landmarks_come_back_in_pixels_of_the_frame(colours) -> None:
    (faces,) = FaceDetector(colours.Detector(), DetectorConfig(size=(64, 64))).detect(
        [colours.frame(width=128, height=128)]
    )
    np.testing.assert_allclose(faces[0].box, np.array(colours.box) * 2)
    np.testing.assert_allclose(faces[0].landmarks, colours.landmarks * 2, rtol=1e-6)
    assert faces[0].score == pytest.approx(0.9)


def test_a_face_found_only_in_the_close_up_is_placed_in_the_frame(colours) -> None:
    class OnlySmall(colours.Detector):
        """Sees a face only where black surrounds it."""

        def run(self, images: np.ndarray) -> list[np.ndarray]:
            centre = images[:, 32:33, 32:33]
            surrounded = (images[:, :1, :1, :1] < 128) & (centre[..., :1] > 191)
            return super().run(np.where(surrounded, centre, 0) * np.ones_like(images))

    frame = colours.frame(width=128, height=128)
    assert FaceDetector(OnlySmall(), DetectorConfig(size=(64, 64), close_up_pass=False)).detect([frame]) == [[]]
    (faces,) = FaceDetector(OnlySmall(), DetectorConfig(size=(64, 64))).detect([frame])
    # Canvas 16..48 is the whole half-scale frame (offset 16, scale 0.25): 0..128 of the frame.
    np.testing.assert_allclose(faces[0].box, [0, 0, 128, 128])


@pytest.mark.parametrize(("output", "what"), [(0, "scores or boxes"), (3, "scores or boxes")])
def test_numbers_that_are_not_finite_are_an_error_and_never_a_verdict(colours, output: int, what: str) -> None:
    class Broken(colours.Detector):
        def run(self, images: np.ndarray) -> list[np.ndarray]:
            outputs = super().run(images)
            outputs[output][0, (4 * 8 + 4) * 2] = np.nan
            return outputs

    with pytest.raises(InferenceFailed, match=what):
        FaceDetector(Broken(), DetectorConfig(size=(64, 64))).detect([colours.frame()])


def test_a_wrong_number_of_anchors_names_found_and_expected(colours) -> None:
    class Short(colours.Detector):
        def run(self, images: np.ndarray) -> list[np.ndarray]:
            return [output[:, :-1] for output in super().run(images)]

    with pytest.raises(InferenceFailed, match=r"127 anchors at stride 8, expected 8x8x2 = 128"):
        FaceDetector(Short(), DetectorConfig(size=(64, 64))).detect([colours.frame()])


@pytest.mark.parametrize("size", [(640, 630), (0, 64), (8192, 64)])
def test_a_detector_size_off_the_grid_is_refused_by_name(size: tuple[int, int]) -> None:
    with pytest.raises(ValidationError, match=f"{size[0]}x{size[1]}: sides must be multiples of 32"):
        DetectorConfig(size=size)
