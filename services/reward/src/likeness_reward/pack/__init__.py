"""Packs of models: folders of ONNX files as InsightFace ships them."""
