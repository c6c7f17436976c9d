"""Each public name is stable or experimental."""

from __future__ import annotations

import importlib
from functools import cache

from griffe import GriffeLoader, ModulesCollection

import moe_dispatch
from docs.stability import EXPERIMENTAL_FIELDS, PUBLIC
from moe_dispatch import DispatcherConfig
from tests.pages import ROOT


@cache
def modules() -> ModulesCollection:
    """Read the three packages. Nothing is imported, so integrations need not be installed."""
    loader = GriffeLoader(search_paths=[ROOT], allow_inspection=False)
    for package in ("moe_dispatch", "moe_dispatch_testing", "moe_dispatch_tools"):
        loader.load(package)
    return loader.modules_collection


def test_lists_have_every_exported_name_and_these_exist() -> None:
    for module, names in PUBLIC.items():
        listed, read = sorted((*names.stable, *names.experimental)), modules()[module]
        exported = [str(name) for name in read.exports or ()]
        if module == "moe_dispatch.errors":
            exported = [name for name, member in read.members.items() if not member.is_alias and member.is_class]
        # Of two modules without ``__all__``, only the names that no package exports are listed.
        assert listed == sorted(exported) or module in ("moe_dispatch.types", "moe_dispatch.config"), module
        if module.count(".") < 2:  # others need packages of integrations
            imported = importlib.import_module(module)
            assert [name for name in listed if not hasattr(imported, name)] == []
    config = DispatcherConfig(num_experts=8, top_k=2, hidden_size=128, wire="mxfp8")
    for field, _, option in (name.partition(".") for name in EXPERIMENTAL_FIELDS):
        assert field in DispatcherConfig.model_fields
        assert not option or option in config.canonical[field]


def test_the_version_has_a_section_in_the_changelog() -> None:
    version = "Unreleased" if ".dev" in moe_dispatch.__version__ else moe_dispatch.__version__
    assert f"\n## [{version}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
