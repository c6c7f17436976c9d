"""Work in the stages of torch's pipelines. See ``docs/training.md``."""

from moe_dispatch.capabilities.pipelining import stages as _stages  # noqa: F401 - the first step of a stage counts nothing twice
from moe_dispatch.capabilities.pipelining.building import build_stage
from moe_dispatch.capabilities.pipelining.packs import read_layout, share_layouts

__all__ = ["build_stage", "read_layout", "share_layouts"]
