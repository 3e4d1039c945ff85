"""Codecs: from a matrix, row weights and settings or a budget to packed bands. numpy only."""
