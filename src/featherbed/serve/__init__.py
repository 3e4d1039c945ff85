"""Serving what was trained: a folder of packed tables as a recommender, with numpy alone."""
