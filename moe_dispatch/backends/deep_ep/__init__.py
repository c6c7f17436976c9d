"""Backends that use the library ``deep_ep``, and a driver for each of its buffer classes.

- ``deepep`` is the backend over ``Buffer`` (v1) or ``ElasticBuffer`` (v2). ``normal_driver`` calls the first and
  ``elastic_driver`` the second; ``driver`` is the interface of both.
- ``hybridep`` is the backend over ``HybridEPBuffer``, which delivers rows ordered by expert. ``hybrid_driver`` calls
  this class.
- ``library`` finds the installed package or its emulation.
- ``pool`` holds buffers that are replaced by larger ones.
- ``switch`` changes a setting of the process while the library is called.
"""
