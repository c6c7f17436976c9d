"""Software ``deep_ep``: its buffer classes over torch.distributed on a CPU, for code that drives them and its tests.

``emulated_deep_ep("v1.2.1")`` is a module with the names of that release; ``imported_as_deep_ep`` puts it where
``import deep_ep`` finds it. Shapes, dtypes, order, handles and refusals follow the source of each release, read and
written anew; no kernel was run for it. What the emulation lacks it refuses with NotImplementedError. Its verbs stand
for kernels, so what they read of tensors is no host sync of their caller's (``allow_host_syncs``).
"""

from moe_dispatch.testing.emulation.refusals import EmulatedAbort, EmulatedHang
from moe_dispatch.testing.emulation.releases import RELEASES, emulated_deep_ep, imported_as_deep_ep

__all__ = ["RELEASES", "EmulatedAbort", "EmulatedHang", "emulated_deep_ep", "imported_as_deep_ep"]
