"""A client in another language, made from the .proto files alone, gets what the Python client gets."""

import json
import shutil
import subprocess
from importlib import resources
from pathlib import Path

import numpy as np
import pytest

from likeness_reward import RewardClient
from likeness_reward.images import encode_png

NODE = Path(__file__).with_name("node")
PROTO = Path(__file__).resolve().parents[3] / "proto"


@pytest.fixture(scope="module")
def node_client(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with score.js and its pinned packages."""
    for program in ("node", "npm"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
    folder = tmp_path_factory.mktemp("node")
    for name in ("package.json", "package-lock.json", ".npmrc", "score.js"):
        shutil.copy(NODE / name, folder)
    done = subprocess.run(["npm", "ci", "--ignore-scripts"], cwd=folder, capture_output=True, text=True, timeout=300)
    if done.returncode != 0:
        pytest.skip(f"npm cannot install @grpc/grpc-js: {done.stderr[-300:]}")
    return folder


def test_a_node_client_made_from_the_proto_files_scores_a_video(node_client: Path, client: RewardClient, colours):
    frames = np.stack([colours.frame(green=green) for green in (0, 40, 80, 120)] + [colours.frame(red=0)])
    photo, raw = node_client / "photo.png", node_client / "frames.rgb"
    photo.write_bytes(encode_png(colours.frame(green=40)))
    raw.write_bytes(frames.tobytes())
    google_rpc = Path(str(resources.files("google.rpc") / "status.proto")).parents[2]
    command = ["node", "score.js", client.endpoint, photo, raw, "64", "64", PROTO, google_rpc]
    done = subprocess.run(command, cwd=node_client, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    identity = client.embed_identity([colours.frame(green=40)])
    expected = client.score(frames, identity)
    assert found["value"] == pytest.approx(expected.value, abs=1e-6)
    assert found["value"] == pytest.approx(
        sum(colours.similarity(40, green) for green in (0, 40, 80, 120)) / 5, abs=1e-5
    )
    assert found["components"]["coverage"] == pytest.approx(0.8)
    assert (found["pack"], found["videoId"], found["frameCount"]) == ("colours", "video", 5)
    assert found["refusal"]["code"] == "INVALID_ARGUMENT"
    assert "images[0]" in found["refusal"]["details"]
