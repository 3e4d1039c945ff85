"""Data sets that experiments run on, real or generated."""
