"""Seeded videos of painted faces, with exact landmarks; NumPy only, no photograph of a person involved.

A world kept narrow on purpose: one head of steady size before a plain background, gentle motion, and people who differ
in large features (skin, hair colour and shape, face width, eye spacing, brows, beard, mouth), so that even a blurred
picture still tells them apart. Every feature is a number, therefore two people can be blended.

Seeds of people: `sample_identity(seed)` with seed >= HELD_OUT_SEED is never used by any training.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

Float = NDArray[np.float32]
Color = tuple[float, float, float]

HELD_OUT_SEED = 1_000_000
"""People with this seed and above are kept for evaluation."""

SUPERSAMPLING = 2
"""Every pixel is the mean of 2 x 2 samples."""

_HAIR_COLORS = (
    (25.0, 20.0, 20.0), (92.0, 58.0, 32.0), (205.0, 165.0, 95.0),
    (140.0, 52.0, 22.0), (172.0, 172.0, 176.0), (60.0, 40.0, 30.0),
)  # fmt: skip
_IRIS_COLORS = ((70.0, 45.0, 25.0), (60.0, 100.0, 150.0), (60.0, 115.0, 70.0), (30.0, 22.0, 18.0))
_LIGHT_SKIN, _DARK_SKIN = np.array((242.0, 202.0, 176.0)), np.array((104.0, 66.0, 46.0))


@dataclass(frozen=True)
class Identity:
    """One person. Colours are RGB in 0..255; lengths are in units of the head's scale, a fraction of the picture."""

    background: Color
    clothes: Color
    skin: Color
    hair: Color
    brow: Color
    iris: Color
    lips: Color
    scale: float
    face_width: float
    face_height: float
    hair_volume: float
    hair_length: float
    fringe: float
    eye_spacing: float
    eye_size: float
    brow_height: float
    brow_thickness: float
    brow_angle: float
    nose_length: float
    nose_width: float
    mouth_height: float
    mouth_width: float
    lip_thickness: float
    beard: float


@dataclass(frozen=True)
class Motion:
    """A gentle movement: each of (x, y, yaw, mouth) is centre + amplitude * sin(rate * t + phase), t in frames."""

    center: tuple[float, float, float, float]
    amplitude: tuple[float, float, float, float]
    rate: tuple[float, float, float, float]
    phase: tuple[float, float, float, float]

    def poses(self, num_frames: int) -> Float:
        """float32 [T, 4]: x and y offset of the head (fractions of the picture), yaw -1..1, mouth opening 0..1."""
        time = np.arange(num_frames)[:, None]
        wave = np.asarray(self.center) + np.asarray(self.amplitude) * np.sin(
            np.asarray(self.rate) * time + np.asarray(self.phase)
        )
        return wave.astype(np.float32)


@dataclass(frozen=True)
class Annotations:
    """Where the face is. landmarks: float32 [T, 5, 2], pixels (x, y), left eye, right eye, nose, left mouth corner,
    right mouth corner as the viewer sees them. boxes: float32 [T, 4], pixels (x1, y1, x2, y2), forehead to chin."""

    landmarks: Float
    boxes: Float


def _generator(seed_or_rng: int | np.random.Generator) -> np.random.Generator:
    return seed_or_rng if isinstance(seed_or_rng, np.random.Generator) else np.random.default_rng(seed_or_rng)


def _color(values: NDArray[np.float64]) -> Color:
    red, green, blue = (float(v) for v in np.clip(values, 0, 255))
    return red, green, blue


def _tinted(grey: float, warmth: float) -> Color:
    return _color(np.array((grey + warmth, grey, grey - warmth)))


def sample_identity(seed_or_rng: int | np.random.Generator) -> Identity:
    """A person; the same seed gives the same person."""
    rng = _generator(seed_or_rng)

    def between(low: float, high: float) -> float:
        return float(rng.uniform(low, high))

    tone = between(0, 1)
    skin = _LIGHT_SKIN * (1 - tone) + _DARK_SKIN * tone
    hair = np.array(_HAIR_COLORS[rng.integers(len(_HAIR_COLORS))]) * between(0.8, 1.2)
    return Identity(
        background=_tinted(between(70, 200), between(-28, 28)),
        clothes=_tinted(between(30, 200), between(-50, 50)),
        skin=_color(skin),
        hair=_color(hair),
        brow=_color(hair * 0.65),
        iris=_IRIS_COLORS[rng.integers(len(_IRIS_COLORS))],
        lips=_color(np.array((190.0, 84.0, 86.0)) * between(0.6, 1.1)),
        scale=between(0.345, 0.365),
        face_width=between(0.74, 0.94),
        face_height=between(0.98, 1.14),
        hair_volume=between(1.08, 1.34),
        hair_length=between(0.0, 1.0),
        fringe=between(0.14, 0.46),
        eye_spacing=between(0.30, 0.44),
        eye_size=between(0.8, 1.3),
        brow_height=between(0.2, 0.31),
        brow_thickness=between(0.025, 0.075),
        brow_angle=between(-16, 16),
        nose_length=between(0.2, 0.34),
        nose_width=between(0.1, 0.2),
        mouth_height=between(0.5, 0.62),
        mouth_width=between(0.2, 0.36),
        lip_thickness=between(0.045, 0.095),
        beard=between(0.25, 0.8) if rng.random() < 0.35 else 0.0,
    )


def sample_motion(seed_or_rng: int | np.random.Generator) -> Motion:
    """A movement gentle enough that a tiny model can learn it."""
    rng = _generator(seed_or_rng)

    def four(low: tuple[float, ...], high: tuple[float, ...]) -> tuple[float, float, float, float]:
        x, y, yaw, mouth = (float(v) for v in rng.uniform(low, high))
        return x, y, yaw, mouth

    return Motion(
        center=four((-0.03, -0.015, -0.2, 0.3), (0.03, 0.015, 0.2, 0.3)),
        amplitude=four((0.0, 0.0, 0.1, 0.1), (0.025, 0.012, 0.5, 0.3)),
        rate=four((0.15, 0.15, 0.15, 0.3), (0.4, 0.4, 0.4, 0.6)),
        phase=four((0.0,) * 4, (2 * np.pi,) * 4),
    )


def blend(first: Identity, second: Identity, amount: float) -> Identity:
    """The person at `amount` of the way from `first` (0) to `second` (1), feature by feature."""
    mixed: dict[str, float | Color] = {}
    for field in fields(Identity):
        a, b = np.asarray(getattr(first, field.name)), np.asarray(getattr(second, field.name))
        value = (1 - amount) * a + amount * b
        mixed[field.name] = float(value) if value.ndim == 0 else _color(value)
    return Identity(**mixed)  # type: ignore[arg-type]


class _People:
    """Features of N frames' people as arrays: float32 [N] for a number, [N, 3] for a colour."""

    def __init__(self, identities: Sequence[Identity]) -> None:
        self._features = {
            field.name: np.asarray([getattr(person, field.name) for person in identities], np.float32)
            for field in fields(Identity)
        }

    def __getattr__(self, name: str) -> Float:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._features[name]


class _Canvas:
    """N supersampled pictures, float32 [N, 3, S, S], painted together; `s` is each head's scale in samples."""

    def __init__(self, people: _People, poses: Float, size: int) -> None:
        self.side = size * SUPERSAMPLING
        self.people = people
        self.s = people.scale * self.side
        self.cx = (0.5 + poses[:, 0]) * self.side
        self.cy = (0.5 + poses[:, 1]) * self.side
        self.turn = poses[:, 2] * 0.22 * self.s
        self.mouth = np.clip(poses[:, 3], 0, 1)
        self.axis = np.arange(self.side, dtype=np.float32) + 0.5
        gradient = (0.85 + 0.3 * self.axis / self.side)[None, None, :, None]
        self.image: Float = np.repeat(people.background[:, :, None, None] * gradient, self.side, axis=3)

    def ellipse(
        self, x: Float, y: Float, width: Float | float, height: Float | float, color: Float | Color,
        softness: float = 1.0, opacity: Float | float = 1.0, angle: Float | float = 0.0,
    ) -> None:  # fmt: skip
        """Paint a soft ellipse of half-axes width, height (head scales); softness in 1/256 of the picture's side."""
        a, b = self._column(np.asarray(width) * self.s), self._column(np.asarray(height) * self.s)
        edge = max(3.0 * softness * self.side / 256, 1.0 * SUPERSAMPLING)
        rotated = bool(np.any(angle))
        rows = self._span(y, np.maximum(a, b) if rotated else b, edge)
        columns = self._span(x, np.maximum(a, b) if rotated else a, edge)
        dx = self.axis[None, None, columns] - self._column(x)
        dy = self.axis[None, rows, None] - self._column(y)
        if rotated:
            turn = np.deg2rad(self._column(np.asarray(angle) + 0 * self.s))
            dx, dy = dx * np.cos(turn) + dy * np.sin(turn), dy * np.cos(turn) - dx * np.sin(turn)
        u, v = dx / a, dy / b
        radius = np.sqrt(u * u + v * v) + np.float32(1e-3)
        slope = np.sqrt((u / a) ** 2 + (v / b) ** 2) + np.float32(1e-6)
        inside = np.clip(0.5 - (radius - 1) * radius / (slope * np.float32(edge)), 0, 1)
        mask = (inside * inside * (3 - 2 * inside) * self._column(np.asarray(opacity) + 0 * self.s))[:, None]
        paint = np.atleast_2d(np.asarray(color, np.float32))[:, :, None, None]
        region = self.image[:, :, rows, columns]
        region += (paint - region) * mask

    def _column(self, values: Float) -> Float:
        return np.asarray(values, np.float32)[:, None, None]

    def _span(self, center: Float, half_axis: Float, edge: float) -> slice:
        reach = half_axis[:, 0, 0] + edge
        return slice(max(0, int(np.min(center - reach))), min(self.side, int(np.max(center + reach)) + 2))

    def pictures(self) -> NDArray[np.uint8]:
        """uint8 [N, size, size, 3]: the mean over each pixel's samples."""
        k = SUPERSAMPLING
        total = np.zeros_like(self.image[:, :, ::k, ::k])
        for row, column in np.ndindex(k, k):
            total += self.image[:, :, row::k, column::k]
        pictures = np.clip(total / (k * k) + 0.5, 0, 255).astype(np.uint8)
        return np.ascontiguousarray(pictures.transpose(0, 2, 3, 1))


def _paint_head(canvas: _Canvas) -> None:
    p, s, cx, cy = canvas.people, canvas.s, canvas.cx, canvas.cy
    skin = p.skin
    canvas.ellipse(
        cx, cy + (0.25 + 0.45 * p.hair_length) * s, p.face_width * (0.95 + 0.35 * p.hair_length), 0.75, p.hair, 3
    )
    canvas.ellipse(cx, cy + 1.6 * s, 1.15, 0.72, p.clothes, 2)
    canvas.ellipse(
        cx, cy - 0.12 * s, p.face_width * p.hair_volume, p.face_height * (0.62 + 0.42 * p.hair_volume), p.hair, 2
    )
    canvas.ellipse(cx, cy + 0.85 * s, 0.33, 0.45, skin * 0.8, 2)
    canvas.ellipse(cx, cy, p.face_width, p.face_height, skin * 0.84, 2)
    canvas.ellipse(
        cx - 0.06 * s, cy - 0.08 * s, p.face_width * 0.7, p.face_height * 0.72, np.minimum(skin * 1.06, 255), 30
    )
    canvas.ellipse(cx, cy + 0.62 * s, p.face_width * 0.78, p.face_height * 0.42, p.hair * 0.85, 8, p.beard)
    canvas.ellipse(cx, cy - p.face_height * s * 0.92, p.face_width * 1.05, p.fringe, p.hair, 3)


def _paint_eyes(canvas: _Canvas) -> None:
    p, s, e, turn = canvas.people, canvas.s, canvas.people.eye_size, canvas.turn
    eye_y = canvas.cy - 0.12 * s
    for side in (-1, 1):
        x = canvas.cx + side * p.eye_spacing * s + turn
        canvas.ellipse(x, eye_y, 0.27 * e, 0.20 * e, p.skin * 0.62, 4, 0.35)
        canvas.ellipse(x, eye_y, 0.17 * e, 0.088 * e, (245, 242, 238), 1)
        canvas.ellipse(x + 0.3 * turn, eye_y, 0.083 * e, 0.083 * e, p.iris, 0.8)
        canvas.ellipse(x + 0.3 * turn, eye_y, 0.045, 0.045, (15, 12, 12), 0.6)
        canvas.ellipse(x, eye_y - 0.085 * s * e, 0.19 * e, 0.024, (40, 28, 25), 1, 0.8)
        canvas.ellipse(
            x, eye_y - p.brow_height * s, 0.21, p.brow_thickness, p.brow, 1.2, 0.9, side * p.brow_angle
        )  # fmt: skip


def _paint_nose_and_mouth(canvas: _Canvas) -> None:
    p, s, cx, cy, turn = canvas.people, canvas.s, canvas.cx, canvas.cy, canvas.turn
    nose_y, mouth_y = cy + p.nose_length * s, cy + p.mouth_height * s
    bright = np.minimum(p.skin * 1.15, 255)
    canvas.ellipse(cx + 1.1 * turn - 0.05 * s, cy + 0.05 * s, 0.05, 0.2, bright, 4, 0.35, 4)
    canvas.ellipse(cx + 1.2 * turn, nose_y, p.nose_width, 0.07, p.skin * 0.72, 3, 0.55)
    for side in (-1, 1):
        nostril_x = cx + 1.2 * turn + side * p.nose_width * 0.5 * s
        canvas.ellipse(nostril_x, nose_y + 0.03 * s, 0.035, 0.022, p.skin * 0.35, 1, 0.8)
    opening = canvas.mouth
    canvas.ellipse(cx + turn, mouth_y + 0.1 * s, p.mouth_width * 1.1, 0.1, p.skin * 0.7, 5, 0.3)
    canvas.ellipse(cx + turn, mouth_y, p.mouth_width, p.lip_thickness + 0.06 * opening, p.lips, 1.2)
    canvas.ellipse(cx + turn, mouth_y, p.mouth_width * 0.85, 0.014 + 0.05 * opening, (90, 25, 30), 1)


def _annotate(canvas: _Canvas) -> Annotations:
    p, s, cx, cy, turn = canvas.people, canvas.s, canvas.cx, canvas.cy, canvas.turn
    eye_y, nose_y, mouth_y = cy - 0.12 * s, cy + p.nose_length * s, cy + p.mouth_height * s
    eye, corner = p.eye_spacing * s, p.mouth_width * s
    points = [
        (cx - eye + turn, eye_y), (cx + eye + turn, eye_y), (cx + 1.2 * turn, nose_y - 0.08 * s),
        (cx - corner + turn, mouth_y), (cx + corner + turn, mouth_y),
    ]  # fmt: skip
    landmarks = np.stack([np.stack(point, -1) for point in points], 1) / SUPERSAMPLING
    half_width, half_height = p.face_width * s * 0.96, p.face_height * s
    boxes = np.stack([cx - half_width, cy - 0.8 * half_height, cx + half_width, cy + half_height], -1) / SUPERSAMPLING
    return Annotations(landmarks.astype(np.float32), boxes.astype(np.float32))


def paint_frames(identities: Sequence[Identity], poses: Float, size: int = 64) -> tuple[NDArray[np.uint8], Annotations]:
    """frames_rgb uint8 [N, size, size, 3] and annotations: one person and one pose (a row of Motion.poses) a frame."""
    if poses.shape != (len(identities), 4):
        raise ValueError(f"poses has shape {poses.shape}; {len(identities)} identities need ({len(identities)}, 4)")
    canvas = _Canvas(_People(identities), np.asarray(poses, np.float32), size)
    _paint_head(canvas)
    _paint_eyes(canvas)
    _paint_nose_and_mouth(canvas)
    return canvas.pictures(), _annotate(canvas)


def render(
    identity: Identity, dx: float = 0.0, dy: float = 0.0, yaw: float = 0.0, mouth_open: float = 0.3, size: int = 64
) -> NDArray[np.uint8]:
    """One frame, uint8 RGB [size, size, 3]; dx, dy move the head (fractions of size), yaw in -1..1, mouth in 0..1."""
    frames, _ = paint_frames([identity], np.array([[dx, dy, yaw, mouth_open]], np.float32), size)
    picture: NDArray[np.uint8] = frames[0]
    return picture


def paint_clip(
    identity: Identity, motion: Motion, num_frames: int = 9, size: int = 64
) -> tuple[NDArray[np.uint8], Annotations]:
    """frames_rgb uint8 [T, size, size, 3] of one steady person, and its annotations."""
    return paint_frames([identity] * num_frames, motion.poses(num_frames), size)


def paint_drifting_clip(
    first: Identity, second: Identity, final_amount: float, motion: Motion, num_frames: int = 9, size: int = 64
) -> tuple[NDArray[np.uint8], Annotations]:
    """A clip that starts as `first` and changes evenly towards `second`, by `final_amount` (0..1) in its last frame."""
    amounts = final_amount * np.linspace(0, 1, num_frames)
    people = [blend(first, second, float(amount)) for amount in amounts]
    return paint_frames(people, motion.poses(num_frames), size)
