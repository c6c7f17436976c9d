"""Backends over the library ``deep_ep``, and what drives each of its buffer classes.

- ``deepep``: the backend over ``Buffer`` (v1, ``normal_driver``) or ``ElasticBuffer`` (v2, ``elastic_driver``); what
  both drivers offer stands in ``driver``.
- ``hybridep``: the backend over ``HybridEPBuffer`` (``hybrid_driver``), which delivers rows by expert.
- ``library`` finds the installed package or its emulation, ``pool`` holds buffers that grow, ``switch`` sets what is
  global to a process while the library is called.
"""
