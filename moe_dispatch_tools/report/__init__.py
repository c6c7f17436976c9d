"""``report``: writes a page about a routing trace or about the log of a run."""
