"""Parts of tables with learned codes: relaxations, guides, cells and normalization."""
