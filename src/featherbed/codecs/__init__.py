"""Codecs: methods that compress a matrix to packed bands, and the search for the best of them."""

# Importing this package imports nothing: names are imported from their modules, and these may be
# used by other packages.
__all__ = [
    "CODECS",
    "LEFT",
    "Codec",
    "CodecJob",
    "CompressionReport",
    "KDFit",
    "ProductFit",
    "ProgressCallback",
    "QualityEvaluator",
    "SparseFit",
    "Target",
    "WeightedRows",
    "allocate_bits",
    "check_quality",
    "choose_scales",
    "codec_of",
    "compress",
    "factorize",
    "fit_grades",
    "grade_ends",
    "no_progress",
    "read_bytes",
    "row_directions",
    "score_words",
]
