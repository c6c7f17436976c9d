"""Convert the models that slime builds: ``--custom-megatron-init-path moe_dispatch.integrations.slime.init``.

``MOE_DISPATCH_BACKEND`` names the backend: ``--train-env-vars '{"MOE_DISPATCH_BACKEND": "hybridep"}'``.

This module imports neither slime nor megatron-core.
"""

from __future__ import annotations

from argparse import Namespace

from moe_dispatch.errors import ConfigError
from moe_dispatch.integrations.built_models import convert_built, from_environment


def init(args: Namespace) -> None:
    """Wrap the function that builds slime's models. slime calls this function in every trainer, before it builds them.

    Raises:
        ConfigError: ``MOE_DISPATCH_BACKEND`` is not set in this process.
    """
    if "backend" not in from_environment():
        raise ConfigError(
            "moe_dispatch.integrations.slime.init: MOE_DISPATCH_BACKEND is not set, so no backend is named. Set it "
            "with --train-env-vars, or leave out --custom-megatron-init-path."
        )
    convert_built("slime.backends.megatron_utils.model", "get_model")
