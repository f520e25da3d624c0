"""The two networks of the tiny face pack, in the input and output conventions of InsightFace's SCRFD and ArcFace."""

import torch
from torch import Tensor, nn

STRIDES = (8, 16, 32)
ANCHORS_PER_CELL = 2
EMBEDDING_LENGTH = 128
CROP_SIDE = 112


def _convolution(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False), nn.BatchNorm2d(outputs)
    )


class Block(nn.Module):
    """Depthwise then pointwise convolution; a residual sum where the shape allows it."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1, kernel: int = 3) -> None:
        super().__init__()
        self.depthwise = _convolution(inputs, inputs, kernel, stride, inputs)
        self.pointwise = _convolution(inputs, outputs, 1)
        self.residual = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        y = self.pointwise(torch.relu(self.depthwise(x)))
        return torch.relu(x + y if self.residual else y)


class FaceDetector(nn.Module):
    """SCRFD-style detector: float32 RGB [1, 3, H, W], (x - 127.5) / 128, H and W multiples of 32.

    `forward` returns nine flat tensors for one picture: scores [N, 1] in 0..1 for strides 8, 16, 32, then boxes
    [N, 4] (distances left, top, right, bottom) and landmarks [N, 10] (offsets x, y), both in units of the stride,
    two anchors a cell, anchored at the cell's top left corner.
    """

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.stem = nn.Sequential(_convolution(3, 16, 3, 2), nn.ReLU(), Block(16, 32, 2), Block(32, 32))
        self.stages = nn.ModuleList([
            nn.Sequential(Block(32, 64, 2), Block(64, 64), Block(64, 64)),
            nn.Sequential(Block(64, 96, 2), Block(96, 96, kernel=5), Block(96, 96, kernel=5)),
            nn.Sequential(Block(96, 128, 2), Block(128, 128, kernel=5), Block(128, 128, kernel=5)),
        ])  # fmt: skip
        self.laterals = nn.ModuleList([_convolution(channels, width, 1) for channels in (64, 96, 128)])
        self.towers = nn.ModuleList([nn.Sequential(Block(width, width), Block(width, width)) for _ in STRIDES])
        self.score_heads = self._heads(width, 1)
        self.box_heads = self._heads(width, 4)
        self.landmark_heads = self._heads(width, 10)
        for head in self.score_heads:
            nn.init.constant_(head.bias, -4.6)  # type: ignore[arg-type]  # a prior of 1 % for "face", as in focal loss
        for head in self.box_heads:
            nn.init.constant_(head.bias, 2.0)  # type: ignore[arg-type]  # distances start positive

    def _heads(self, width: int, values: int) -> nn.ModuleList:
        return nn.ModuleList([nn.Conv2d(width, ANCHORS_PER_CELL * values, 1) for _ in STRIDES])

    def maps(self, pictures: Tensor) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Score logits, boxes and landmarks per stride: float32 [B, 2 * k, H / stride, W / stride], k = 1, 4, 10."""
        features, x = [], self.stem(pictures)
        for stage in self.stages:
            x = stage(x)
            features.append(x)
        levels = [lateral(feature) for lateral, feature in zip(self.laterals, features, strict=True)]
        for finer in (1, 0):
            upsampled = nn.functional.interpolate(levels[finer + 1], scale_factor=2.0, mode="nearest")
            levels[finer] = levels[finer] + upsampled
        towers = [tower(level) for tower, level in zip(self.towers, levels, strict=True)]
        scores = [head(tower) for head, tower in zip(self.score_heads, towers, strict=True)]
        boxes = [head(tower) for head, tower in zip(self.box_heads, towers, strict=True)]
        landmarks = [head(tower) for head, tower in zip(self.landmark_heads, towers, strict=True)]
        return scores, boxes, landmarks

    def forward(self, picture: Tensor) -> tuple[Tensor, ...]:
        scores, boxes, landmarks = self.maps(picture)
        # Conv, Transpose, Reshape (and Sigmoid): the form of the published SCRFD files, which graph tools look for.
        flat = [torch.sigmoid(score.permute(2, 3, 0, 1).reshape(-1, 1)) for score in scores]
        flat += [box.permute(2, 3, 0, 1).reshape(-1, 4) for box in boxes]
        flat += [points.permute(2, 3, 0, 1).reshape(-1, 10) for points in landmarks]
        return tuple(flat)


class FaceRecognizer(nn.Module):
    """ArcFace-style recogniser: float32 RGB [B, 3, 112, 112], (x - 127.5) / 127.5, to float32 [B, 128], any length."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            _convolution(3, 16, 3, 2), nn.ReLU(),
            Block(16, 32, 2), Block(32, 32),
            Block(32, 64, 2), Block(64, 64), Block(64, 64),
            Block(64, 128, 2), Block(128, 128), Block(128, 128), Block(128, 128),
            nn.Conv2d(128, 128, 7, groups=128, bias=False),
        )  # fmt: skip
        self.embed = nn.Sequential(
            nn.BatchNorm1d(128), nn.Linear(128, EMBEDDING_LENGTH), nn.BatchNorm1d(EMBEDDING_LENGTH)
        )

    def forward(self, crops: Tensor) -> Tensor:
        embeddings: Tensor = self.embed(self.layers(crops).flatten(1))
        return embeddings
