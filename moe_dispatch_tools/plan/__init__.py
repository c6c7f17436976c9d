"""``plan``: forecasts what a model will send, pad and allocate on a cluster of any size."""
