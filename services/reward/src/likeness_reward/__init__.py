"""Likeness reward: how well a generated video keeps the identity of a person.

The base install is a gRPC client and a command line; the [server] extra adds the models' runtime and the server.
"""

from importlib.metadata import version

from likeness_reward.client import RewardClient
from likeness_reward.domain import FrameScore, IdentityTemplate, ScoreOptions, Verdict, VideoReward
from likeness_reward.errors import LikenessError

__version__ = version("likeness-reward")

__all__ = [
    "FrameScore",
    "IdentityTemplate",
    "LikenessError",
    "RewardClient",
    "ScoreOptions",
    "Verdict",
    "VideoReward",
]
