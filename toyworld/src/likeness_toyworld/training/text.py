"""Builds the toy's tokenizer and its small text encoder, which stays at its seeded initialisation.

A random encoder gives each prompt its own fixed context, which is all that a world with one kind of video asks for.
"""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from likeness_toyworld.tiny_wan import TEXT_ENCODER_SIZES, TinyWanTextEncoder

PROMPTS = (
    "a portrait of a person, static camera",
    "a person looks at the camera",
    "a person turns the head slowly",
    "a person speaks to the camera, plain background",
    "close-up of a face",
    "a man with short hair",
    "a woman with long hair",
)
_WORDS = """
and at background beard black blond blue brown camera close-up dark eyes face green grey hair head in is left light long
looks man middle mouth moves of old on open opens plain portrait person red right round short slowly smiles smiling
speaks static the to turns up video wide with woman young
"""
_LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789,.!?-'"
_SPECIAL_TOKENS = ("<pad>", "</s>", "<unk>")


def _vocabulary() -> list[tuple[str, float]]:
    """Pieces with their log-probabilities: whole words are likely, letters are there to spell the rest."""
    words = sorted(set(_WORDS.split()) | {word.strip(",") for prompt in PROMPTS for word in prompt.split()})
    pieces = [(token, 0.0) for token in _SPECIAL_TOKENS]
    pieces += [(f"\u2581{word}", -4.0) for word in words]
    pieces += [("\u2581", -6.0), *((letter, -8.0) for letter in _LETTERS)]
    if len(pieces) > TEXT_ENCODER_SIZES["vocab"]:
        raise ValueError(f"{len(pieces)} pieces; the text encoder has {TEXT_ENCODER_SIZES['vocab']} embeddings")
    return pieces


def build_tokenizer(folder: Path) -> None:
    """Save a unigram tokenizer over a fixed vocabulary, as AutoTokenizer reads it."""
    tokenizer = Tokenizer(models.Unigram(_vocabulary(), unk_id=_SPECIAL_TOKENS.index("<unk>")))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", tokenizer.token_to_id("</s>"))]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=512
    ).save_pretrained(folder)


def build_text_encoder(seed: int = 0) -> TinyWanTextEncoder:
    """The text encoder at its seeded initialisation."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return TinyWanTextEncoder(**TEXT_ENCODER_SIZES).eval()
