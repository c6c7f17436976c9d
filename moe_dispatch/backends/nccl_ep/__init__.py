"""``nccl_ep``: NVIDIA's own transport of expert rows, through the public functions of transformer-engine.

- ``library`` finds ``transformer_engine.pytorch.ep``, and says why it cannot be used.
- ``exchange`` is one dispatch of the library in flight, with the backwards that transformer-engine's autograd knows.
- ``backend`` has the options, the backend, which sizes the library's group for all calls, and the route.

The library delivers rows ordered by expert and adds expert rows up, so this folder only applies weights and counts.
"""
