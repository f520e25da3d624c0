"""Trains LoRA adapters of Wan video models from identity rewards."""
