"""Published tables and our own studies: settings in TOML, one harness, results, reports."""
