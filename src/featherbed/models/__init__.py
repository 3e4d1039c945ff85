"""Models of others over compact tables: token tables compressed in place, rows read from disk."""
