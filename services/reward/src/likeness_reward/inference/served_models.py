"""What a Triton model repository and the service that uses it agree on."""

from pydantic import BaseModel, ConfigDict

DETECTOR = "face_detector"
RECOGNIZER = "face_recognizer"
"""Names of the two models."""
GRADIENT = "face_gradient"
"""Name of a third one, the recognizer with its derivative, which a repository may have."""
IMAGES = "images_rgb"
"""Name of their input: uint8 RGB [N, H, W, 3]."""
TEMPLATES = "templates"
"""Second input of the gradient's model: float32 [N, D]."""
SIMILARITIES = "similarities"
GRADIENTS = "gradients"
"""Its outputs: float32 [N, 1] and [N, 3, H, W]."""


class ModelParameters(BaseModel):
    """What config.pbtxt says of a model beside Triton's own: enough to know which pack's numbers it gives."""

    model_config = ConfigDict(frozen=True)

    pack_name: str
    """Name of the pack."""
    network_hash: str
    """SHA-256 of the network's file in the pack, with "-fp16" when that is its precision."""
    config: str
    """DetectorConfig or RecognizerConfig as JSON."""
