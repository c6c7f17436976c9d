"""What stands between a model and a backend: checks, sizes, padding of rows, autograd, counters.

One call passes, in this order:

- ``dispatcher``: the class that a model calls.
- ``verbs``: dispatch and combine; what an eager call and a traced one do.
- ``planning``: the checks of a call, the sizes that ranks agree on, and how peers hear of a refusal.
- ``autograd``: what both verbs and their backwards run.
- ``operators``: the same as operators of torch, for ``torch.compile`` and selective checkpointing.

Padding: how many rows a rank brings follows from the backend's ``Constraints`` (``padded`` and ``brought``), is agreed
on in ``planning`` and applied by ``autograd.Selection``. How many rows an expert gets follows from ``pad_multiple`` of
the config, and is applied after the exchange by ``permutation.index``, or by a library with ``pads_experts``.

Beside the call: ``channel`` (what dispatchers of one config and group share), ``opening`` and ``requirements``
(building one), ``overflow``, ``metrics``, ``capture`` and ``self_test``.
"""

from moe_dispatch.dispatchers.dispatcher import Dispatcher, build_dispatcher
from moe_dispatch.dispatchers.metrics import Metrics
from moe_dispatch.dispatchers.overflow import RequiredCapacity

__all__ = ["Dispatcher", "Metrics", "RequiredCapacity", "build_dispatcher"]
