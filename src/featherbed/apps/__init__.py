"""Applications on top of the library: recommenders, text classifiers, language models."""
