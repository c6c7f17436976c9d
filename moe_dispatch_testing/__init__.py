"""Tools for the tests of this library and for your tests: a conformance kit for backends, ranks, and counters.

``import moe_dispatch`` does not import this package. ``check_backend("mine")`` runs the conformance kit.
``conformance_cases("mine")`` yields its cases one by one, for ``pytest.mark.parametrize``. ``run_ranks`` runs ranks as
threads of this process. ``run_processes`` runs ranks as processes.
"""

from moe_dispatch_testing.case import Case, run_case
from moe_dispatch_testing.counting import Collective, Collectives, count_collectives
from moe_dispatch_testing.host_syncs import (
    HostRead,
    HostSyncError,
    allow_host_syncs,
    count_host_syncs,
    refuse_host_syncs,
)
from moe_dispatch_testing.kit import Excuse, Failure, Report, check_backend, conformance_cases, excuses
from moe_dispatch_testing.ranks import RankFailed, Ranks, run_processes, run_ranks
from moe_dispatch_testing.reference import ConformanceError
from moe_dispatch_testing.scenario import Scenario
from moe_dispatch_testing.scenarios import SCENARIOS
from moe_dispatch_testing.strict import Strict, StrictOptions
from moe_dispatch_testing.tracing import trace_static

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
    "RankFailed",
    "Ranks",
    "Report",
    "Scenario",
    "Strict",
    "StrictOptions",
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
