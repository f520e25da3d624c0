"""From the metadata file to examples: columns, formats, sizes, and every bad row told at once."""

from __future__ import annotations

import json

import numpy as np
import pytest
from PIL import Image
from pydantic import ValidationError

from likeness_trainer.data import DataConfig, DatasetError, RowProblem, check, load_dataset

from .conftest import numbered_frames


@pytest.fixture
def good_video(tmp_path, write_video):
    """A video of nine numbered 32x48 frames beside the metadata file."""
    return write_video(tmp_path / "good.mp4", numbered_frames(9))


def config(metadata, **options):
    return DataConfig(metadata=metadata, **{"num_frames": 9, **options})


@pytest.mark.parametrize("name", ["metadata.csv", "metadata.json", "metadata.jsonl"])
def test_the_three_formats_give_the_same_rows(tmp_path, write_metadata, good_video, name):
    Image.new("RGB", (64, 64), (9, 8, 7)).save(tmp_path / "face.png")
    rows = [
        {"video": "good.mp4", "prompt": "a woman, smiling", "reference_image": "face.png"},
        {"video": str(good_video), "prompt": "a man", "reference_image": ""},
    ]
    text = {
        "metadata.csv": 'video,prompt,reference_image\ngood.mp4,"a woman, smiling",face.png\n'
        + f"{good_video},a man,\n",
        "metadata.json": json.dumps(rows),
        "metadata.jsonl": "\n".join(json.dumps(row) for row in rows) + "\n",
    }[name]
    dataset = load_dataset(config(write_metadata(text, name)))
    assert [row.prompt for row in dataset.rows] == ["a woman, smiling", "a man"]
    assert [row.reference_image for row in dataset.rows] == [tmp_path / "face.png", None]
    assert len(dataset) == 2
    assert dataset.problems == ()


def test_an_example_of_a_video(write_metadata, good_video):
    example = load_dataset(config(write_metadata("prompt,video\na man,good.mp4\n"), num_frames=5))[0]
    assert (example.row, example.prompt) == (1, "a man")
    assert (example.height, example.width, example.num_frames) == (32, 48, 5)
    assert example.reference_frames.shape == (5, 32, 48, 3)
    assert example.reference_frames.dtype == np.uint8
    assert example.reference_frames[:, 0, 0, 0].tolist() == [0, 10, 20, 30, 40]
    assert np.array_equal(example.first_frame, example.reference_frames[0])


def test_a_reference_image_is_the_first_frame_and_gives_the_size(tmp_path, write_metadata, good_video):
    Image.new("RGB", (80, 64), (9, 8, 7)).save(tmp_path / "face.png")
    text = "video,prompt,reference_image\ngood.mp4,a man,face.png\n"
    example = load_dataset(config(write_metadata(text)))[0]
    assert (example.height, example.width) == (64, 80)
    assert np.array_equal(example.first_frame, np.full((64, 80, 3), (9, 8, 7), np.uint8))
    assert example.reference_frames.shape == (9, 32, 48, 3), "the person still comes from the video, at its own shape"


def test_a_still_image_stands_for_a_video(tmp_path, write_metadata):
    Image.new("RGB", (50, 40), (9, 8, 7)).save(tmp_path / "face.png")
    example = load_dataset(config(write_metadata("video,prompt\nface.png,a man\n")))[0]
    assert example.first_frame.shape == (32, 48, 3)
    assert example.reference_frames.shape == (1, 32, 48, 3)
    assert example.num_frames == 9


def test_a_fixed_size_fits_video_and_image(tmp_path, write_metadata, good_video):
    Image.new("RGB", (80, 64)).save(tmp_path / "face.png")
    text = "video,prompt,reference_image\ngood.mp4,a man,face.png\n"
    example = load_dataset(config(write_metadata(text), height=64, width=32))[0]
    assert example.first_frame.shape == (64, 32, 3)
    assert example.reference_frames.shape == (9, 64, 32, 3)


def test_max_pixels_bounds_the_area(write_metadata, good_video):
    example = load_dataset(config(write_metadata("video,prompt\ngood.mp4,a man\n"), max_pixels=32 * 32))[0]
    assert (example.height, example.width) == (16, 32)  # 32x48 scaled by sqrt(1024/1536) is 26.1x39.2


def test_fps_decides_how_many_frames_there_are(write_metadata, good_video):
    metadata = write_metadata("video,prompt\ngood.mp4,a man\n")
    assert check(config(metadata, fps=16)) == []
    (problem,) = check(config(metadata, fps=8))
    assert problem.reason.endswith("has 5 frame(s) at 8 frames a second, num_frames is 9")


def test_every_bad_row_is_told_at_once_with_its_reason(tmp_path, write_metadata, write_video, good_video):
    write_video(tmp_path / "short.mp4", numbered_frames(5))
    write_video(tmp_path / "small.mkv", numbered_frames(9, height=8, width=64), codec="ffv1", pixel_format="bgr0")
    (tmp_path / "zero.mp4").write_bytes(b"")
    (tmp_path / "text.mp4").write_bytes(b"no video")
    (tmp_path / "text.png").write_bytes(b"no image")
    (tmp_path / "folder").mkdir()
    metadata = write_metadata(
        "video,prompt,reference_image,note\n"
        "good.mp4,fine,,\n"
        "missing.mp4,x,,\n"
        "zero.mp4,x,,\n"
        "text.mp4,x,,\n"
        "short.mp4,x,,\n"
        "folder,x,,\n"
        "small.mkv,x,,\n"
        "text.png,x,,\n"
        "good.mp4,,,\n"
        ",x,,\n"
        "missing.mp4,x,text.png,\n"
        "good.mp4,a, b, c, d\n"
        "good.mp4\n"
        '"good.mp4","two\nlines",,\n'
        "good.mp4,fine,,\n"
    )
    problems = check(config(metadata))
    expected = {
        2: ["video {}/missing.mp4 does not exist"],
        3: ["video {}/zero.mp4 is empty (0 bytes)"],
        4: ["video {}/text.mp4 is no readable video: Invalid data found when processing input"],
        5: ["video {}/short.mp4 has 5 frame(s) at 16 frames a second, num_frames is 9"],
        6: ["video {}/folder is a folder"],
        7: ["video {}/small.mkv has 8x64 pixels (height x width), which leaves a side below 16 within 230400 pixels"],
        8: ["video {}/text.png is no readable image: no known image format"],
        9: ["prompt is empty"],
        10: ["video is empty"],
        11: [
            "video {}/missing.mp4 does not exist",
            "reference_image {}/text.png is no readable image: no known image format",
        ],
        12: ["has 5 cells, the header has 4; quote a text that contains commas"],
        13: ["has 1 cells, the header has 4; quote a text that contains commas"],
    }
    found: dict[int, list[str]] = {}
    for problem in problems:
        found.setdefault(problem.row, []).append(problem.reason)
    assert found == {row: [reason.format(tmp_path) for reason in reasons] for row, reasons in expected.items()}
    assert problems[0].line == 3, "row 2 is in line 3, below the header"
    assert str(problems[0]).startswith("row 2 (line 3): video ")

    with pytest.raises(DatasetError) as caught:
        load_dataset(config(metadata))
    assert caught.value.problems == tuple(problems)
    assert "12 of 15 rows cannot be used" in str(caught.value)
    assert all(str(problem) in str(caught.value) for problem in problems)

    dataset = load_dataset(config(metadata, skip_bad_rows=True))
    assert [row.number for row in dataset.rows] == [1, 14, 15], "a line break inside quotes is fine, duplicates too"
    assert dataset.problems == tuple(problems)


def test_no_row_left_is_an_error_even_when_bad_rows_are_skipped(write_metadata):
    with pytest.raises(DatasetError, match="no row can be used") as caught:
        load_dataset(config(write_metadata("video,prompt\nmissing.mp4,x\n"), skip_bad_rows=True))
    assert [problem.row for problem in caught.value.problems] == [1]


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("metadata.csv", "", "is empty"),
        ("metadata.csv", " \n\n", "is empty"),
        ("metadata.csv", "video,prompt\n", "holds no rows"),
        ("metadata.csv", "video,text\na,b\n", "lacks the column prompt; its header has 'video', 'text'"),
        ("metadata.csv", "file,text\na,b\n", "lacks the column video and prompt"),
        ("metadata.csv", "video;prompt\na;b\n", "cells are separated by commas"),
        ("metadata.csv", "video,prompt,video\na,b,c\n", "has the column video more than once"),
        ("metadata.csv", 'video,prompt\na,"never closed\nb,c\n', "is no valid CSV, line 3"),
        ("metadata.json", "{", "is no valid JSON, line 1"),
        ("metadata.json", '{"video": "a"}', "holds a JSON dict, needed is a list of objects"),
        ("metadata.json", "[]", "holds no rows"),
        ("metadata.txt", "video,prompt\n", "has the suffix '.txt', allowed: .csv, .json, .jsonl"),
    ],
)
def test_a_faulty_file_is_named(write_metadata, name, text, reason):
    metadata = write_metadata(text, name)
    with pytest.raises(DatasetError) as caught:
        check(config(metadata))
    assert str(caught.value).startswith(f"{metadata}: ")
    assert reason in str(caught.value)


def test_a_file_that_is_missing_a_folder_or_not_utf_8_is_named(tmp_path):
    with pytest.raises(DatasetError, match="does not exist"):
        check(config(tmp_path / "metadata.csv"))
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(DatasetError, match="is a folder"):
        check(config(tmp_path / "folder.csv"))
    (tmp_path / "latin.csv").write_bytes("video,prompt\na.mp4,café\n".encode("latin-1"))
    with pytest.raises(DatasetError, match="is not UTF-8: byte 0xe9 in line 2"):
        check(config(tmp_path / "latin.csv"))
    (tmp_path / "wide.csv").write_text("video,prompt\n", encoding="utf-16")
    with pytest.raises(DatasetError, match="is not UTF-8: byte 0xff in line 1"):
        check(config(tmp_path / "wide.csv"))


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_a_byte_order_mark_spaces_and_windows_lines_do_no_harm(tmp_path, good_video, newline):
    path = tmp_path / "metadata.csv"
    path.write_bytes(newline.join(["\ufeffvideo, prompt", ' good.mp4 , "a man, old"', ""]).encode("utf-8"))
    assert load_dataset(config(path)).rows[0].prompt == "a man, old"


def test_json_values_of_a_wrong_type_are_bad_rows(write_metadata, good_video):
    lines = [
        '{"video": "good.mp4", "prompt": "fine", "reference_image": null}',
        '{"video": ["good.mp4"], "prompt": "x"}',
        '{"video": "good.mp4", "prompt": 5}',
        '["good.mp4", "x"]',
        '{"video": "good.mp4"',
        "",
        '{"video": "good\\u0000.mp4", "prompt": "x"}',
    ]
    problems = check(config(write_metadata("\n".join(lines), "metadata.jsonl")))
    assert problems == [
        RowProblem(2, 2, "video is ['good.mp4'], needed is a text"),
        RowProblem(3, 3, "prompt is 5, needed is a text"),
        RowProblem(4, 4, "is a JSON list, needed is an object"),
        RowProblem(5, 5, "is no valid JSON: Expecting ',' delimiter at character 21"),
        RowProblem(6, 7, "video contains a NUL character"),
    ]


def test_a_file_that_vanishes_later_is_named_with_its_row(write_metadata, good_video):
    dataset = load_dataset(config(write_metadata("video,prompt\ngood.mp4,a man\n")))
    good_video.unlink()
    with pytest.raises(DatasetError, match=r"row 1 \(line 2\): video .*good\.mp4 does not exist"):
        dataset[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_frames": 10}, r"num_frames is 10, allowed: 4n\+1; nearest are 9 and 13"),
        ({"num_frames": 0}, "num_frames"),
        ({"height": 64}, "height is 64 and width is None, allowed: both or neither"),
        ({"height": 64, "width": 50}, "width is 50, allowed: multiples of 16"),
        ({"fps": 0}, "fps"),
        ({"max_pixels": 100}, "max_pixels"),
        ({"max_pixel": 1000}, "max_pixel"),
    ],
)
def test_an_impossible_configuration_is_refused(tmp_path, options, message):
    with pytest.raises(ValidationError, match=message):
        config(tmp_path / "metadata.csv", **options)
