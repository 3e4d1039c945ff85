"""Tasks: ordinary training loops, readable top to bottom. Import the one you need: ``featherbed.tasks.ratings``."""
