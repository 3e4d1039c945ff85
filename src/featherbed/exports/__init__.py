"""Packed tables in the formats of others: what runs a table where featherbed is not installed."""
