"""An emulation of ``deep_ep``: its buffer classes on a CPU, over torch.distributed, to test code that calls them.

``emulated_deep_ep("v1.2.1")`` returns a module with the names of that release. ``imported_as_deep_ep`` makes ``import
deep_ep`` find this module. Shapes, dtypes, orders, handles and refusals follow the source of each release. The code is
written anew, and no kernel was run for it. A method that is not emulated raises NotImplementedError.

The methods stand for kernels. So if a method reads tensor values, this does not count as a host sync of its caller
(``allow_host_syncs``).
"""

from moe_dispatch_testing.emulation.refusals import EmulatedAbort, EmulatedHang
from moe_dispatch_testing.emulation.releases import RELEASES, emulated_deep_ep, imported_as_deep_ep

__all__ = ["RELEASES", "EmulatedAbort", "EmulatedHang", "emulated_deep_ep", "imported_as_deep_ep"]
