"""``compare``: sends the same tokens through several backends and peers, checks the results and measures the costs."""
