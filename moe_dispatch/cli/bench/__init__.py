"""``bench``: what dispatching costs, beside the dispatchers of torchtitan and transformers."""
