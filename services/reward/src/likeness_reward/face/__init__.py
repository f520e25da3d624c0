"""Finding, aligning and recognising faces, and what that is worth: pure NumPy and OpenCV."""
