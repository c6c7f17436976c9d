"""Backends that use the library ``deep_ep``, and a driver for each of its buffer classes.

- ``deepep`` is the backend over ``Buffer`` (v1) or ``ElasticBuffer`` (v2). ``normal_driver`` calls the first and
  ``elastic_driver`` the second; ``driver`` is the interface of both.
- ``hybridep`` is the backend over ``HybridEPBuffer``, which delivers rows ordered by expert. ``hybrid_driver`` calls
  this class.
- ``expert_major`` has the gradients of routes whose library delivers rows ordered by expert.
- ``library`` finds the installed package or its emulation.
- ``buffers`` holds buffers that are replaced by larger ones, and changes settings of the process.

What runs when the backward of ``combine`` runs on ``hybridep``:

1. ``dispatchers.autograd``: the backward of ``combine`` calls ``combine_backward`` of the route.
2. ``expert_major.ExpertMajorRoute.combine_backward``: the gradient travels as rows do in dispatch, by ``spread``. Then
   it is multiplied by the weights, and the dot product with each expert row is the gradient of its weight.
3. ``hybridep.HybridRoute.spread``: passes the handle of the dispatch on.
4. ``hybrid_driver.HybridDriver.send_again``: calls ``dispatch_with_permute`` of the library with this handle.

The backward of ``dispatch`` takes the same way with ``dispatch_backward``, ``collect`` and ``combine_with_unpermute``.
"""
