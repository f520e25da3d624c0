"""Train the tiny face detector: `python -m likeness_toyworld.training.detector --steps 2400 --out FOLDER`.

Seeded; one thread of an ordinary CPU does the default number of steps in about fifteen minutes.
"""

import argparse
import dataclasses
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from likeness_toyworld.face_pack import pictures, targets
from likeness_toyworld.face_pack.export import export_detector, write_description
from likeness_toyworld.face_pack.networks import FaceDetector
from likeness_toyworld.face_pack.scenes import Scene, ScenePainter

SCENE_SIDES_AND_BATCHES = ((128, 32), (320, 6), (512, 3))
SCENE_SHARES = (0.82, 0.13, 0.05)


@dataclasses.dataclass(frozen=True)
class DetectorTraining:
    """How the detector is trained."""

    steps: int = 2400
    minutes: float | None = None
    """Stop after this time at the latest; the learning rate's schedule follows whichever limit is nearer."""
    portraits: int = 4096
    """Painted portraits in memory; every step composes new scenes from them."""
    learning_rate: float = 4e-3
    warmup: float = 0.03
    seed: int = 0


def normalise(scenes: list[Scene]) -> Tensor:
    """float32 [B, 3, H, W] in SCRFD's input range."""
    stacked = torch.from_numpy(np.stack([scene.picture_rgb for scene in scenes]))
    return (stacked.permute(0, 3, 1, 2).float() - 127.5) / 128


def flatten(maps: Tensor, values: int) -> Tensor:
    """[B, 2 * values, h, w] to [B, h * w * 2, values], the order of the flat outputs."""
    return maps.permute(0, 2, 3, 1).reshape(maps.shape[0], -1, values)


def score_loss(logits: Tensor, labels: Tensor, gamma: float = 2.0) -> Tensor:
    """Sum of the focal loss (arXiv 1708.02002) over anchors that are not ignored; logits, labels: [B, N]."""
    truth = (labels == targets.POSITIVE).float()
    entropy = functional.binary_cross_entropy_with_logits(logits, truth, reduction="none")
    miss = (torch.sigmoid(logits) - truth).abs()
    weight = miss.pow(gamma)
    return (weight * entropy * (labels != targets.IGNORED)).sum()


def overlap(predicted: Tensor, truth: Tensor) -> Tensor:
    """Generalised IoU (arXiv 1902.09630) of distance boxes around the same anchors; [P, 4] each, result [P]."""
    low, high = torch.minimum(predicted, truth), torch.maximum(predicted, truth)
    shared = (low[:, 0] + low[:, 2]).clamp(min=0) * (low[:, 1] + low[:, 3]).clamp(min=0)
    hull = (high[:, 0] + high[:, 2]) * (high[:, 1] + high[:, 3])
    area = (predicted[:, 0] + predicted[:, 2]) * (predicted[:, 1] + predicted[:, 3])
    union = area + (truth[:, 0] + truth[:, 2]) * (truth[:, 1] + truth[:, 3]) - shared
    return shared / union - (hull - union) / hull


def detection_loss(detector: FaceDetector, scenes: list[Scene]) -> tuple[Tensor, dict[str, float]]:
    """The loss of one batch (scalar) and its parts."""
    maps = detector.maps(normalise(scenes))
    scores = boxes = landmarks = torch.zeros(())
    positives = 1
    for level, target in enumerate(targets.assign(scenes)):
        labels = torch.from_numpy(target.labels)
        chosen = labels == targets.POSITIVE
        positives += int(chosen.sum())
        scores = scores + score_loss(flatten(maps[0][level], 1)[..., 0], labels)
        if not chosen.any():
            continue
        true_boxes = torch.from_numpy(target.boxes)[chosen]
        side = ((true_boxes[:, 0] + true_boxes[:, 2]) * (true_boxes[:, 1] + true_boxes[:, 3])).sqrt()[:, None]
        boxes = boxes + (1 - overlap(flatten(maps[1][level], 4)[chosen], true_boxes)).sum()
        error = (flatten(maps[2][level], 10)[chosen] - torch.from_numpy(target.landmarks)[chosen]) / side
        landmarks = (
            landmarks + functional.smooth_l1_loss(error, torch.zeros_like(error), beta=0.02, reduction="sum") / 10
        )
    total = (2.0 * scores + 1.0 * boxes + 8.0 * landmarks) / positives
    parts = {"score": scores, "box": boxes, "landmark": landmarks}
    return total, {name: float(value.detach()) / positives for name, value in parts.items()}


def train(settings: DetectorTraining) -> FaceDetector:
    """A trained detector, in eval mode."""
    torch.manual_seed(settings.seed)
    rng = np.random.default_rng(settings.seed)
    half, quarter = settings.portraits // 2, settings.portraits // 4
    pools = [
        pictures.paint_portraits([pictures.training_person(rng) for _ in range(count)], rng, size)
        for size, count in ((64, half), (64, quarter), (128, quarter))
    ]
    painter = ScenePainter(pools, rng)
    detector = FaceDetector().to(memory_format=torch.channels_last)
    decayed = [p for p in detector.parameters() if p.ndim > 1]
    plain = [p for p in detector.parameters() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 1e-3}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=settings.learning_rate)
    start, step, progress = time.monotonic(), 0, 0.0
    while progress < 1:
        rate = min(1.0, progress / settings.warmup + 0.02) * 0.5 * (1 + np.cos(np.pi * progress))
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * rate
        side, batch = SCENE_SIDES_AND_BATCHES[int(rng.choice(len(SCENE_SHARES), p=SCENE_SHARES))]
        detector.train(
            side == SCENE_SIDES_AND_BATCHES[0][0]
        )  # the batches of large scenes are too small for statistics
        loss, parts = detection_loss(detector, [painter.scene(side) for _ in range(batch)])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(detector.parameters(), 5.0)
        optimizer.step()
        step += 1
        minutes = (time.monotonic() - start) / 60
        progress = max(step / settings.steps, minutes / settings.minutes if settings.minutes else 0.0)
        if step % 50 == 0:
            shown = " ".join(f"{name} {value:.4f}" for name, value in parts.items())
            print(f"step {step} {minutes:.1f} min side {side} loss {float(loss.detach()):.4f} {shown}", flush=True)
    return detector.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=DetectorTraining.steps)
    parser.add_argument("--minutes", type=float, default=None)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="folder for detector.onnx and pack.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    detector = train(DetectorTraining(steps=arguments.steps, minutes=arguments.minutes, seed=arguments.seed))
    print(export_detector(detector, arguments.out), write_description(arguments.out))


if __name__ == "__main__":
    main()
