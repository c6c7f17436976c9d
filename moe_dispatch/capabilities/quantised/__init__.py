"""Rows of 8 bits. Public names are those of ``moe_dispatch.quantised``.

- ``formats`` has the wire formats "float8_e4m3fn" and "mxfp8", and finds those of other packages.
- ``options`` has the options of ``wire``.
- ``rows`` has quantised rows as experts get them, and their gradients.
- ``adapters`` has functions for torch, torchao, transformer-engine and DeepGEMM.

The seam is ``moe_dispatch.backends.wire``.
"""
