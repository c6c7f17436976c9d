"""What the backends that drive ``deep_ep`` share: finding the library, its buffers, and one module per buffer class."""
