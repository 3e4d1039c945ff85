"""Language models: settings → data → model → fit → run, and serve without torch."""
