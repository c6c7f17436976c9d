"""``report``: a page on a routing trace or on the log of a run."""
