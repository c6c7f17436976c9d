"""``bench``: measures the cost of a dispatch, beside the dispatchers of torchtitan and transformers."""
