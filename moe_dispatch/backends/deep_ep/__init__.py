"""Backends that use the library ``deep_ep``, one for each of its buffer classes.

- ``deepep`` is the backend over ``Buffer`` (v1), ``ElasticBuffer`` (v2) or ``EPBuffer`` (V2.5). ``rank_rows`` has what
  is the same for all releases; ``deepep_v1`` calls the first class and ``deepep_v2`` the other two.
- ``hybridep`` is the backend over ``HybridEPBuffer``, which delivers rows ordered by expert. ``hybrid_rules`` tells the
  versions of this class apart.
- ``expert_major`` has the route, with its gradients, of dispatches whose library delivers rows ordered by expert.
- ``library`` finds the installed package or its emulation, and has the base of the options.
- ``buffers`` has the base of the backends: buffers that are replaced by larger ones, and settings of the process.

What runs when the backward of ``combine`` runs on ``hybridep``:

1. ``dispatchers.autograd``: the backward of ``combine`` calls ``combine_backward`` of the route.
2. ``expert_major.ExpertMajorRoute.combine_backward``: the gradient travels as rows do in dispatch, by ``spread``. Then
   it is multiplied by the weights, and the dot product with each expert row is the gradient of its weight.
3. ``hybridep.HybridEP.send_again``: calls ``dispatch_with_permute`` of the library with the handle of the dispatch.

The backward of ``dispatch`` takes the same way with ``dispatch_backward``, ``combine`` and ``combine_with_unpermute``.
"""
