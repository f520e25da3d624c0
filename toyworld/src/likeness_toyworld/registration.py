"""Tells DiffSynth how to recognise the tiny models."""


def register_models() -> None:
    """Add the tiny models to DiffSynth's table of known checkpoints; calling it again changes nothing."""
    from likeness_toyworld.tiny_wan import register

    register()
