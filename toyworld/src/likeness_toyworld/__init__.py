"""A toy world for Likeness: painted faces, a tiny Wan2.2-style image-to-video model and a tiny face pack.

Importing this package loads neither torch nor DiffSynth.
"""

from likeness_toyworld.assets import TEXT_TOKENS, face_pack_path, model_paths, tokenizer_path
from likeness_toyworld.registration import register_models

__all__ = ["TEXT_TOKENS", "face_pack_path", "model_paths", "register_models", "tokenizer_path"]
