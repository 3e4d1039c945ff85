"""``fb.compress`` and its commands: an existing matrix to a budget or a quality, with a report."""
