"""The packed form: what the file holds and what numpy alone can look up, score and search."""
