"""Writes the files that ship with the package from trained weights, in float16.

`python -m likeness_toyworld.training.assemble --vae FILE --high-noise FILE --low-noise FILE`
"""

import argparse
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from likeness_toyworld.assets import ASSETS, model_paths
from likeness_toyworld.training.text import build_text_encoder, build_tokenizer


def save_half(weights: Mapping[str, Tensor], path: str | Path) -> None:
    """Write weights in float16; every value must be finite in float16."""
    half = {key: value.detach().to(torch.float16).contiguous() for key, value in weights.items()}
    for key, value in half.items():
        if not bool(torch.isfinite(value).all()):
            raise ValueError(f"{key} has values that float16 cannot hold (its range is +-65504)")
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    save_file(half, path)


def main() -> None:
    """Command line of this module."""
    parser = argparse.ArgumentParser(description="Write the weights that ship with the package.")
    parser.add_argument("--vae", type=Path)
    parser.add_argument("--high-noise", type=Path)
    parser.add_argument("--low-noise", type=Path)
    arguments = parser.parse_args()
    paths = model_paths()
    sources = {"vae": arguments.vae, "dit": arguments.high_noise, "dit2": arguments.low_noise}
    for name, source in sources.items():
        if source is not None:
            save_half(load_file(source), paths[name])
    save_half(build_text_encoder().state_dict(), paths["text_encoder"])
    build_tokenizer(ASSETS / "tokenizer")
    for path in sorted(file for file in ASSETS.rglob("*") if file.is_file()):
        print(f"{path.stat().st_size / 1e6:8.3f} MB  {path.relative_to(ASSETS)}")


if __name__ == "__main__":
    main()
