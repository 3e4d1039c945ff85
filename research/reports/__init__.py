"""Reports: the README and the pictures of each group of experiments."""
