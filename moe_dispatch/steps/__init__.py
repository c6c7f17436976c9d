"""Ways to make the calls of a step that stand beside the dispatcher. Nothing of this is loaded before it is asked for.

``chunks`` runs a layer call in parts, for ``chunks`` in the config. ``rounds`` lets ranks have different numbers of
micro-batches. Users import both functions from ``moe_dispatch.dispatchers``.
"""
