"""Backends over the library ``deep_ep``: ``deepep`` and ``hybridep``, and what drives each of its buffer classes."""
