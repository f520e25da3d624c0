"""Settings of what stays in the device's memory. Apart from the code, because importing torch models takes seconds."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class MemoryConfig(BaseModel):
    """What leaves the device while it is not needed. None of it changes a result."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    drop_encoders: bool = True
    """Free the text encoder, the VAE's encoder and the image encoder once every prompt and first frame is encoded."""
    swap_idle_expert: bool = False
    """Keep the frozen weights of one of two experts on the device at a time; both stay in CPU memory."""
