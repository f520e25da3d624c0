"""Paths of the files that ship with the package."""

from pathlib import Path

TEXT_TOKENS = 12
"""Length to which the toy's prompts are padded."""

ASSETS = Path(__file__).parent / "weights"


def model_paths() -> dict[str, str]:
    """Files of the tiny Wan2.2-I2V: dit (high noise), dit2 (low noise), vae, text_encoder."""
    return {
        "dit": str(ASSETS / "high_noise_model" / "diffusion_pytorch_model.safetensors"),
        "dit2": str(ASSETS / "low_noise_model" / "diffusion_pytorch_model.safetensors"),
        "vae": str(ASSETS / "wan_vae.safetensors"),
        "text_encoder": str(ASSETS / "text_encoder.safetensors"),
    }


def tokenizer_path() -> str:
    """Folder of the tokenizer, as transformers' AutoTokenizer reads it."""
    return str(ASSETS / "tokenizer")


def face_pack_path() -> str:
    """Folder of the tiny face pack: ONNX files as InsightFace ships them."""
    return str(ASSETS / "face_pack")
