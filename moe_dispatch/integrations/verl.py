"""The plug-in for verl: convert the models of its Megatron engine.

verl imports this module by itself, because moe-dispatch declares it in the entry-point group ``verl.plugins``. It does
nothing unless a backend is named, in the config of an engine or in the environment:

    +actor_rollout_ref.actor.megatron.override_mcore_model_config.moe_dispatch.backend=hybridep
    MOE_DISPATCH_BACKEND=hybridep

This module imports neither verl nor megatron-core.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from moe_dispatch.errors import ConfigError
from moe_dispatch.integrations.built_models import after_import, convert_built, from_environment


def settings(*args: Any, override_model_config: Mapping[str, Any] | None = None, **kwargs: Any) -> dict[str, Any]:
    """Return the keywords of ``convert`` from ``override_mcore_model_config.moe_dispatch``, else the environment.

    Raises:
        ConfigError: The config has ``moe_dispatch``, but it is no mapping with a ``backend``.
    """
    given = (override_model_config or {}).get("moe_dispatch")
    if given is None:
        return from_environment()
    if not isinstance(given, Mapping) or "backend" not in given:
        raise ConfigError(
            f"override_mcore_model_config: moe_dispatch must be a mapping with a backend, got {given!r}. Pass "
            "+...override_mcore_model_config.moe_dispatch.backend=alltoall."
        )
    return {name: _as_dict(value) for name, value in given.items()}


def _as_dict(value: Any) -> Any:
    """Return a mapping of verl's config, such as the options of a backend, as a dict."""
    return {key: _as_dict(item) for key, item in value.items()} if isinstance(value, Mapping) else value


def _keep_lengths(module: ModuleType) -> None:
    """Make the function that packs sequences keep their lengths.

    verl gives Megatron the offsets of the padded sequences twice. The lengths without padding are known only in this
    function, from the nested tensor that it packs. ``convert`` reads them to send no padding.
    """
    pack: Callable[..., Any] | None = getattr(module, "preprocess_thd_engine", None)
    if pack is None:  # another version of verl, whose padding is then dispatched like tokens
        return

    @functools.wraps(pack)
    def pack_and_keep(input_ids: Any, *args: Any, **kwargs: Any) -> Any:
        packed = pack(input_ids, *args, **kwargs)
        params = packed[1]
        params.moe_dispatch_cu_seqlens = input_ids.offsets().to(params.cu_seqlens_q.dtype)
        return packed

    module.preprocess_thd_engine = pack_and_keep  # type: ignore[attr-defined]


# verl sets the root logger to WARNING, which would hide what was converted. Its own loggers follow this variable.
logging.getLogger("moe_dispatch").setLevel(os.environ.get("VERL_LOGGING_LEVEL", "INFO"))
convert_built("verl.utils.megatron_utils", "make_megatron_module", settings=settings)
after_import("verl.models.mcore.util", _keep_lengths)
