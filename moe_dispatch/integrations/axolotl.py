"""The plug-in for Axolotl: its expert parallelism moves rows through dispatchers of this library.

Axolotl imports this module by itself, because moe-dispatch declares it in the entry-point group ``axolotl.plugins``. It
does nothing unless the YAML of a run names a backend:

    expert_parallel_size: 8
    moe_dispatch:
      backend: alltoall
      balance: exact

Axolotl shards the experts, wraps the model and saves it as before. Its own plug-in for expert parallelism comes first
in each step, so experts are sharded when ours looks at them.
"""

from __future__ import annotations

from typing import Any, final

from axolotl.integrations.base import BasePlugin
from axolotl.integrations.expert_parallel import torch_dispatch
from pydantic import BaseModel, Field, model_validator

from moe_dispatch.errors import ConfigError, IntegrationError
from moe_dispatch.integrations.checks import check_version, checked_options, refuse_quantised_rows
from moe_dispatch.integrations.transformers import attach, config_for, register

__all__ = ["MoEDispatchArgs", "MoEDispatchPlugin"]

_GROUP = "get_ep_group"  # the function that returns the group in which Axolotl's plug-in has sharded the experts
# Settings of Axolotl's own transports and kernels, which would have no effect, and the values that ask for nothing.
_UNUSED: dict[str, tuple[Any, ...]] = {
    "expert_parallel_backend": (None, "auto", "torch"),
    "expert_parallel_dispatch_chunks": (None, 1),
    "expert_parallel_save_dispatch": (None, False),
    "expert_parallel_token_capacity": (None,),
    "experts_implementation": (None, "grouped_mm", "expert_parallel"),
    "use_scattermoe": (None, False),
    "use_sonicmoe": (None, False),
}


class MoEDispatchArgs(BaseModel):
    """The key that this plug-in adds to Axolotl's YAML."""

    moe_dispatch: dict[str, Any] | None = Field(
        default=None,
        description="Fields of a DispatcherConfig, such as backend and balance. Sizes come from the model.",
    )

    @model_validator(mode="after")
    def _check_moe_dispatch(self) -> MoEDispatchArgs:
        """Check the fields, and the settings of Axolotl if this model is merged with its config.

        Raises:
            ValueError: A field is unknown or wrong, or a setting of Axolotl contradicts them.
        """
        if self.moe_dispatch is None:
            return self
        check_version("axolotl")
        if not hasattr(torch_dispatch, _GROUP):
            raise IntegrationError(
                f"moe_dispatch: axolotl has changed a private name that this integration needs: no "
                f"torch_dispatch.{_GROUP}. Install axolotl 0.21.0."
            )
        config = checked_options(**self.moe_dispatch)
        refuse_quantised_rows("moe_dispatch", config)
        if config.graph_safe:
            raise ConfigError(
                "moe_dispatch: graph_safe must be False, because transformers' experts functions read all rows, also "
                "slack, got True. Leave graph_safe out."
            )
        if "expert_parallel_size" not in type(self).model_fields:  # not merged with Axolotl's own config
            return self
        if (ranks := getattr(self, "expert_parallel_size", None) or 1) == 1:
            raise ConfigError(
                f"moe_dispatch: expert_parallel_size must be at least 2, or no rows travel, got {ranks}. Set it to the "
                "number of ranks that share the experts, or leave moe_dispatch out."
            )
        for name, allowed in _UNUSED.items():
            if (value := getattr(self, name, None)) not in allowed:
                raise ConfigError(
                    f"moe_dispatch: {name} belongs to Axolotl's own dispatch and kernels, which do not run with "
                    f"moe_dispatch, got {value!r}. Leave {name} out, or moe_dispatch."
                )
        # With it Axolotl opens no buffer of DeepEP, and a recomputed router chooses as in the forward.
        vars(self)["expert_parallel_backend"] = "torch"
        return self


@final
class MoEDispatchPlugin(BasePlugin):  # type: ignore[misc]
    """What Axolotl's PluginManager calls while it loads a model."""

    def get_input_args(self) -> str:
        """Return the name of the model of our key."""
        return f"{MoEDispatchArgs.__module__}.{MoEDispatchArgs.__qualname__}"

    def post_model_load(self, cfg: Any, model: Any) -> None:
        """Wire the experts that Axolotl has sharded, under their adapters, to dispatchers. Collective.

        Axolotl sets the experts function of the config after ``post_model_build``, so it would replace ours there.

        Raises:
            ConfigError: The model's config contradicts the fields, or there is one process only.
        """
        if cfg.moe_dispatch is None:
            return
        group = torch_dispatch.get_ep_group()
        if group is None:
            raise ConfigError(
                "moe_dispatch: the ranks must be separate processes, got one without torch.distributed. Launch Axolotl "
                "with torchrun or accelerate."
            )
        config = config_for(model.config, **cfg.moe_dispatch.to_dict())
        # One process may load several models, also with other groups.
        name = f"moe_dispatch_{config.digest}_{group.group_name}"
        register(config, group=group, name=name)
        model.set_experts_implementation(name)
        attach(model)
