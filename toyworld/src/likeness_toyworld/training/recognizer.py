"""Train the tiny face recogniser: `python -m likeness_toyworld.training.recognizer --steps 2000 --out FOLDER`.

ArcFace on painted people, and blends of two people pulled to the matching place on the arc between their centres, so
that the cosine falls steadily as a face turns into another one's. Seeded; one thread of an ordinary CPU does the
default number of steps in about fifteen minutes.
"""

import argparse
import dataclasses
import time
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from likeness_toyworld.face_pack import pictures
from likeness_toyworld.face_pack.crops import align
from likeness_toyworld.face_pack.export import export_recognizer, write_description
from likeness_toyworld.face_pack.networks import EMBEDDING_LENGTH, FaceRecognizer
from likeness_toyworld.face_pack.pictures import Picture, Points, Portraits
from likeness_toyworld.painter import blend


@dataclasses.dataclass(frozen=True)
class RecognizerTraining:
    """How the recogniser is trained."""

    steps: int = 2000
    minutes: float | None = None
    """Stop after this time at the latest; the learning rate's schedule follows whichever limit is nearer."""
    people: int = 1600
    portraits_of_each: int = 6
    blends: int = 4800
    batch: int = 64
    blend_batch: int = 32
    learning_rate: float = 3e-3
    warmup: float = 0.03
    scale: float = 24.0
    """ArcFace's s: the length of the logits' arc."""
    margin: float = 0.3
    """ArcFace's m, radians; it grows from 0 over the first third of the training."""
    blend_weight: float = 6.0
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class Gallery:
    """Portraits of the training people. first, second: int64 [N], people; amount: float32 [N], 0 for no blend."""

    portraits: Portraits
    first: NDArray[np.int64]
    second: NDArray[np.int64]
    amount: NDArray[np.float32]


def paint_galleries(settings: RecognizerTraining, rng: np.random.Generator) -> tuple[Gallery, Gallery]:
    """Portraits of each person, and blends of two random people at random amounts in 0.08..0.92."""
    people = [pictures.training_person(rng) for _ in range(settings.people)]
    owners = np.repeat(np.arange(settings.people), settings.portraits_of_each)
    pure = pictures.paint_portraits([people[i] for i in owners], rng, 64)
    first = rng.integers(settings.people, size=settings.blends)
    second = (first + rng.integers(1, settings.people, size=settings.blends)) % settings.people
    amount = rng.uniform(0.08, 0.92, settings.blends).astype(np.float32)
    mixed = [blend(people[a], people[b], float(t)) for a, b, t in zip(first, second, amount, strict=True)]
    blends = pictures.paint_portraits(mixed, rng, 64)
    return (
        Gallery(pure, owners, owners, np.zeros(len(owners), np.float32)),
        Gallery(blends, first, second, amount),
    )


def crop_for_training(frame: Picture, landmarks: Points, rng: np.random.Generator) -> Picture:
    """uint8 [112, 112, 3]: degraded, with the landmark errors of a detector, sometimes mirrored."""
    if rng.random() < 0.9:
        frame = pictures.degrade(frame, rng)
    eye_distance = float(np.linalg.norm(landmarks[1] - landmarks[0]))
    noise = rng.normal(0, 0.025 * eye_distance, (5, 2)) + rng.normal(0, 0.02 * eye_distance, 2)
    crop = align(frame, (landmarks + noise).astype(np.float32))
    return np.ascontiguousarray(crop[:, ::-1]) if rng.random() < 0.5 else crop


def training_crops(gallery: Gallery, chosen: NDArray[np.int64], rng: np.random.Generator) -> Tensor:
    """float32 [B, 3, 112, 112] in ArcFace's input range."""
    crops = [
        crop_for_training(gallery.portraits.frames_rgb[i], gallery.portraits.landmarks[i], rng) for i in chosen
    ]  # fmt: skip
    return (torch.from_numpy(np.stack(crops)).permute(0, 3, 1, 2).float() - 127.5) / 127.5


class IdentityLoss(nn.Module):
    """ArcFace (arXiv 1801.07698) with one centre a person, and the arc loss for blends."""

    def __init__(self, people: int, scale: float) -> None:
        super().__init__()
        self.centers = nn.Parameter(torch.randn(people, EMBEDDING_LENGTH))
        self.scale = scale

    def pure(self, embeddings: Tensor, people: Tensor, margin: float) -> Tensor:
        """Cross-entropy over people with the angle to the own centre enlarged by `margin` radians."""
        cosines = functional.normalize(embeddings) @ functional.normalize(self.centers).T
        own = cosines.gather(1, people[:, None]).clamp(-1 + 1e-6, 1 - 1e-6)
        enlarged = torch.cos((torch.acos(own) + margin).clamp(max=torch.pi))
        return functional.cross_entropy(self.scale * cosines.scatter(1, people[:, None], enlarged), people)

    def blended(self, embeddings: Tensor, first: Tensor, second: Tensor, amount: Tensor) -> Tensor:
        """Mean of 1 - cosine to the point at `amount` of the great arc between two people's centres."""
        centers = functional.normalize(self.centers.detach())
        a, b = centers[first], centers[second]
        angle = torch.acos((a * b).sum(1).clamp(-1 + 1e-6, 1 - 1e-6))
        target = (torch.sin((1 - amount) * angle)[:, None] * a + torch.sin(amount * angle)[:, None] * b) / torch.sin(
            angle
        )[:, None]
        return (1 - (functional.normalize(embeddings) * functional.normalize(target)).sum(1)).mean()


def batch_loss(
    recognizer: FaceRecognizer, criterion: IdentityLoss, galleries: tuple[Gallery, Gallery],
    settings: RecognizerTraining, progress: float, rng: np.random.Generator,
) -> tuple[Tensor, dict[str, float]]:  # fmt: skip
    """The loss of one random batch of portraits and blends, and its parts."""
    pure, mixed = galleries
    chosen = rng.integers(len(pure.first), size=settings.batch)
    blended = rng.integers(len(mixed.first), size=settings.blend_batch)
    crops = torch.cat([training_crops(pure, chosen, rng), training_crops(mixed, blended, rng)])
    embeddings = recognizer(crops.to(memory_format=torch.channels_last))
    margin = settings.margin * min(1.0, 3 * progress)
    identity = criterion.pure(embeddings[: settings.batch], torch.from_numpy(pure.first[chosen]), margin)
    arc = criterion.blended(
        embeddings[settings.batch :],
        torch.from_numpy(mixed.first[blended]),
        torch.from_numpy(mixed.second[blended]),
        torch.from_numpy(mixed.amount[blended]),
    )
    weight = settings.blend_weight * min(1.0, 3 * progress)
    return identity + weight * arc, {"identity": float(identity.detach()), "blend": float(arc.detach())}


def train(settings: RecognizerTraining) -> FaceRecognizer:
    """A trained recogniser, in eval mode."""
    torch.manual_seed(settings.seed)
    rng = np.random.default_rng(settings.seed + 1)
    galleries = paint_galleries(settings, rng)
    recognizer = FaceRecognizer().to(memory_format=torch.channels_last)
    criterion = IdentityLoss(settings.people, settings.scale)
    groups = [
        {"params": [p for p in recognizer.parameters() if p.ndim > 1], "weight_decay": 5e-3},
        {"params": [p for p in recognizer.parameters() if p.ndim <= 1], "weight_decay": 0.0},
        {"params": list(criterion.parameters()), "weight_decay": 5e-3},
    ]
    optimizer = torch.optim.AdamW(groups, lr=settings.learning_rate)
    start, step, progress = time.monotonic(), 0, 0.0
    while progress < 1:
        rate = min(1.0, progress / settings.warmup + 0.02) * 0.5 * (1 + np.cos(np.pi * progress))
        for group, factor in zip(optimizer.param_groups, (1.0, 1.0, 3.0), strict=True):
            group["lr"] = settings.learning_rate * rate * factor
        loss, parts = batch_loss(recognizer, criterion, galleries, settings, progress, rng)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(recognizer.parameters(), 5.0)
        optimizer.step()
        step += 1
        minutes = (time.monotonic() - start) / 60
        progress = max(step / settings.steps, minutes / settings.minutes if settings.minutes else 0.0)
        if step % 50 == 0:
            shown = " ".join(f"{name} {value:.4f}" for name, value in parts.items())
            print(f"step {step} {minutes:.1f} min {shown}", flush=True)
    return recognizer.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=RecognizerTraining.steps)
    parser.add_argument("--minutes", type=float, default=None)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="folder for recognizer.onnx and pack.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    recognizer = train(RecognizerTraining(steps=arguments.steps, minutes=arguments.minutes, seed=arguments.seed))
    print(export_recognizer(recognizer, arguments.out), write_description(arguments.out))


if __name__ == "__main__":
    main()
