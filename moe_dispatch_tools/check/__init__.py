"""``check``: the conformance kit on one backend."""
