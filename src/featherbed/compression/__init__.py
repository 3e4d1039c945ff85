"""Compress an existing matrix: codecs, how well its rows are kept, and the search for the best one within a budget."""
