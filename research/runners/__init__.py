"""Runners, one module for each kind of experiment."""
