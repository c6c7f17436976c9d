"""``compare``: the same tokens through several backends, held against a reference."""
