"""Recordings of real steps for reports, experiments and bug reports: routing traces, and logs of whole runs."""

from moe_dispatch_tools.traces.run_log import RunLog, RunWriter
from moe_dispatch_tools.traces.trace import Call, Part, Trace

__all__ = ["Call", "Part", "RunLog", "RunWriter", "Trace"]
