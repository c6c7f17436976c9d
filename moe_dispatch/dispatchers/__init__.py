"""Dispatchers: own padding and sizes, validate, and connect layouts to backends."""

from moe_dispatch.dispatchers.dispatcher import Dispatcher, build_dispatcher
from moe_dispatch.dispatchers.metrics import Metrics
from moe_dispatch.dispatchers.overflow import RequiredCapacity

__all__ = ["Dispatcher", "Metrics", "RequiredCapacity", "build_dispatcher"]
