"""The tiny face pack: how its two networks are built, what pictures they learn from, and how they become ONNX files."""
