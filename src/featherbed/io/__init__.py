"""Readers of files people have: matrices and checkpoints (``featherbed.io.vectors``)."""
