"""Tools for tests, this library's and yours: the conformance kit that any backend can run, ranks as threads, counters.

Not imported by ``import moe_dispatch``. ``check_backend("mine")`` runs the kit; ``conformance_cases("mine")`` gives its
cases one by one, for ``pytest.mark.parametrize``.
"""

from moe_dispatch.testing.arrival import ConformanceError
from moe_dispatch.testing.case import Case, run_case
from moe_dispatch.testing.counting import Collective, Collectives, count_collectives
from moe_dispatch.testing.host_syncs import HostSyncError, allow_host_syncs, refuse_host_syncs
from moe_dispatch.testing.kit import Excuse, Failure, Report, check_backend, conformance_cases, excuses
from moe_dispatch.testing.ranks import Ranks, run_processes, run_ranks
from moe_dispatch.testing.reads import HostRead, count_host_syncs
from moe_dispatch.testing.scenario import Scenario
from moe_dispatch.testing.scenarios import SCENARIOS
from moe_dispatch.testing.strict import Strict
from moe_dispatch.testing.tracing import trace_static

__all__ = [
    "SCENARIOS",
    "Case",
    "Collective",
    "Collectives",
    "ConformanceError",
    "Excuse",
    "Failure",
    "HostRead",
    "HostSyncError",
    "Ranks",
    "Report",
    "Scenario",
    "Strict",
    "allow_host_syncs",
    "check_backend",
    "conformance_cases",
    "count_collectives",
    "count_host_syncs",
    "excuses",
    "refuse_host_syncs",
    "run_case",
    "run_processes",
    "run_ranks",
    "trace_static",
]
