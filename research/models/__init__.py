"""Models of papers, one file for each task, to be read from top to bottom."""
