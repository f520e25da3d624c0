"""Likeness reward: how well a generated video keeps the identity of a person.

The base install is a gRPC client and a command line; the [embedded] extra adds the models' runtime, the
[server] extra the server.
"""

from importlib.metadata import version

from likeness_reward.aio import AsyncRewardClient
from likeness_reward.client import RewardClient
from likeness_reward.domain import FrameScore, IdentityTemplate, ScoreOptions, Verdict, VideoReward
from likeness_reward.errors import LikenessError
from likeness_reward.many import RetryPolicy, VideoToScore

__version__ = version("likeness-reward")

__all__ = [
    "AsyncRewardClient",
    "FrameScore",
    "IdentityTemplate",
    "LikenessError",
    "RetryPolicy",
    "RewardClient",
    "ScoreOptions",
    "Verdict",
    "VideoReward",
    "VideoToScore",
]
