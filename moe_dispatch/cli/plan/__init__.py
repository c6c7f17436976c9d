"""``plan``: what a model will send, pad and allocate on a cluster that need not exist."""
