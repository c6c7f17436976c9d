"""What observes calls and collectives. Nothing of this is loaded before a config, a block or a wrapper asks for it.

- ``watchdog``: gives the collectives of a group a time limit, and finds the rank that the others wait for.
- ``recorder``: keeps the routing of dispatches, for a trace file or a ``RoutingTable``.
- ``wrappers``: warns if DistributedDataParallel or FSDP manages parameters of different experts.

The seam is ``moe_dispatch/seams/observers.py``.
"""
