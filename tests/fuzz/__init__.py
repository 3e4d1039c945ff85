"""Fuzzing: corrupted files, opened and used in worker processes with limits of time and memory."""
