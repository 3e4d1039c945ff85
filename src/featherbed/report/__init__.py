"""Report pages: the only HTML of the package. Pages are single files that load nothing else."""

__all__ = ["language_page", "ratings_page", "text_page"]
