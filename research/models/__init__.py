"""Models of the papers that are no application of the package: one file each, read from the top down."""
