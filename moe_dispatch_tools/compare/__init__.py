"""``compare``: sends the same tokens through several backends and compares the results with a reference."""
