"""Pages for people: what a file holds and what a compression did, as one HTML file that needs no network and no torch."""
