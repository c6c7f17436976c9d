"""What dispatching costs, beside the dispatchers of torchtitan and transformers."""
