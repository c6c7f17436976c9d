"""What the vendor backends say of themselves, by version, environment and topology, and what is refused for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from moe_dispatch import Routing, build_dispatcher
from moe_dispatch.backends import Constraints, MoEShape
from moe_dispatch.backends.deep_ep import hybrid_rules as hybrid
from moe_dispatch.backends.deep_ep import hybridep as hybridep_module
from moe_dispatch.backends.deep_ep.deepep import DeepEPOptions
from moe_dispatch.backends.deep_ep.hybridep import HybridEPOptions
from moe_dispatch.errors import ConfigError, InputError
from moe_dispatch_testing.emulation import emulated_deep_ep
from tests.deep_ep_backends.conftest import Setting, Wrap
from tests.deep_ep_backends.vendors import HYBRID, V1, V2, config
from tests.dispatchers.layer import on_ranks, outcomes_on, raises_everywhere

DOMAIN = "NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN"


def shape(ep_size: int = 8, ranks_per_node: int | None = None, experts: int = 64) -> MoEShape:
    return MoEShape(
        num_experts=experts, top_k=4, hidden_size=1024, ep_size=ep_size, pad_multiple=1, ranks_per_node=ranks_per_node
    )


def deepep(where: MoEShape, **options: Any) -> Constraints:
    return DeepEPOptions(**{"emulate": True, **options}).constraints(where)


def hybridep(where: MoEShape, **options: Any) -> Constraints:
    return HybridEPOptions(**{"emulate": True, **options}).constraints(where)


@pytest.mark.parametrize(
    ("ep_size", "ranks_per_node", "fits"),
    [(2, 2, True), (4, 8, True), (4, 2, False), (8, 4, False), (16, 8, True), (16, 16, True), (16, 4, False)],
)
def test_groups_of_v1_follow_the_nodes(ep_size: int, ranks_per_node: int, fits: bool) -> None:
    places: list[Callable[[], Constraints]] = [
        lambda: deepep(shape(ep_size, ranks_per_node), emulate="v1.2.1"),
        lambda: deepep(shape(ep_size, 3), emulate="v1.2.1", ranks_per_node=ranks_per_node),
    ]
    for constraints in places:
        if fits:
            assert constraints().group_sizes == frozenset({2, 4, 8, 16, 32, 64, 128, 144, 160})
            continue
        text = (
            f"a group of {ep_size} ranks must have {min(ep_size, 8)} ranks per node, got {ranks_per_node} per node. Use"
        )
        with pytest.raises(ConfigError, match=text):
            constraints()


def test_numbers_of_v1_v2_and_v25() -> None:
    v1, v2 = deepep(shape(), emulate="v1.2.1"), deepep(shape(), emulate="v2-2.1.0")
    assert deepep(shape()) == v2  # with 8 ranks, 2048 experts in all are 256 per rank
    assert deepep(shape(ep_size=2)).max_local_experts == 512
    assert deepep(shape(ep_size=2), emulate="v2-2.1.0").max_local_experts == 256
    assert (v1.hidden_multiple, v1.max_hidden, v1.max_top_k, v1.max_local_experts) == (256, 8191, 32, 128)
    assert (v2.hidden_multiple, v2.max_hidden, v2.max_top_k, v2.max_local_experts) == (256, None, 32, 256)
    assert deepep(shape(ep_size=64), emulate="v2-2.1.0").max_local_experts == 32  # 2048 experts in all
    assert (v1.equal_rows, v1.group_max, v1.differentiable) == (False, False, True)
    assert (v2.equal_rows, v2.group_max, v2.differentiable) == (False, True, True)
    assert all(deepep(shape(), emulate=release, expand=True).pads_experts for release in ("v2-2.1.0", "v2.5.0"))
    with pytest.raises(ConfigError, match=r"expand needs v2 or V2.5, got v1. Leave expand out, or install V2.5"):
        deepep(shape(), emulate="v1.2.1", expand=True)


@pytest.mark.parametrize(
    ("release", "ranks_per_domain", "multiple"),
    [
        ("hybridep-34152ae", 4, 64),
        ("hybridep-94a9f8f", 8, 1),
        ("hybridep-94a9f8f", 4, 1),
        ("hybridep-94a9f8f", 2, 2),
        ("hybridep-94a9f8f", 1, 4),
        ("hybridep-744", 1, 1),
    ],
)
def test_row_multiple_of_hybridep(release: str, ranks_per_domain: int, multiple: int) -> None:
    found = hybridep(shape(), emulate=release, ranks_per_domain=ranks_per_domain)
    assert found.row_multiple == multiple
    assert found.equal_rows == (release != "hybridep-744")
    assert found.min_rows == (0 if release == "hybridep-744" else 1)


def test_chunks_come_from_the_variables_the_library_reads(variables: Setting) -> None:
    variables(NUM_OF_TOKENS_PER_CHUNK_DISPATCH_API="96", NUM_OF_TOKENS_PER_CHUNK_COMBINE_API="128")
    assert hybridep(shape(), emulate="hybridep-34152ae").row_multiple == 384
    assert hybridep(shape(ranks_per_node=4), emulate="hybridep-34152ae").max_rows == 21760


@pytest.mark.parametrize(("chunk", "most"), [("64", 21824), ("128", 21760), ("32", 21824)])
def test_rows_across_domains(chunk: str, most: int, variables: Setting) -> None:
    variables(NUM_OF_TOKENS_PER_CHUNK_COMBINE_API=chunk)
    assert 3 * most + 1 < 65536 <= 3 * (most + int(chunk)) + 1
    assert hybridep(shape(ranks_per_node=4)).max_rows == most
    assert hybridep(shape(ranks_per_node=8)).max_rows is None


def test_chunks_keep_rows_across_domains_below_the_limit() -> None:
    """Megatron #3999: a buffer for a whole micro-batch needs a deeper queue than the network has."""
    across: dict[str, Any] = {"backend": {**HYBRID, "ranks_per_domain": 1}, "max_tokens_per_rank": 30000}

    def body(group: Any) -> None:
        with pytest.raises(ConfigError, match="at most 21824 rows per rank fit"):
            build_dispatcher(config(**across), group)
        build_dispatcher(config(**across, chunk_tokens=16384), group)

    on_ranks(body, 2)


def test_the_domain_is_configured_or_named_by_its_variable_or_detected(variables: Setting) -> None:
    assert hybrid.domain_of(shape(ranks_per_node=4), None) == 4
    assert hybrid.domain_of(shape(), None) == 8
    variables(**{DOMAIN: "2"})
    assert hybrid.domain_of(shape(ranks_per_node=4), None) == 2
    assert hybrid.domain_of(shape(ranks_per_node=4), 1) == 1
    assert hybrid.domain_of(shape(ranks_per_node=4), 72) == 8


@pytest.mark.parametrize(("domain", "multiple"), [(1, 4), (2, 2), (3, 4), (4, 1), (6, 2), (8, 1)])
def test_experts_per_rank_times_ranks_per_domain_divide_by_four(domain: int, multiple: int) -> None:
    assert hybridep(shape(ep_size=24, experts=96), ranks_per_domain=domain).local_experts_multiple == multiple


class EarlyBuffer:
    """The parameters of 1dddd19 that tell its rules: it has neither non-blocking calls nor fused ones."""

    def __init__(self, group: Any, ib_dev_name_list: Any = None) -> None: ...

    def dispatch_with_permute(self, *, hidden: Any, pad_multiple: Any = None) -> None: ...


def test_numbers_of_early_hybridep_releases() -> None:
    early, new = hybrid.rules(EarlyBuffer), hybridep(shape())
    assert early.row_multiple(8) == 128
    old = hybrid.constraints(early, "cuda", shape(), 8)
    assert (old.hidden_multiple, new.hidden_multiple) == (512, 16)
    assert old.group_sizes is not None
    assert new.group_sizes is not None
    assert (old.max_local_experts, new.max_local_experts) == (224, 768)
    assert (old.max_hidden, new.max_hidden) == (8192, None)
    assert 1 not in old.group_sizes
    assert 1 in new.group_sizes
    assert 73 not in new.group_sizes
    assert new.pads_experts
    assert not old.idle_ranks
    assert not old.graph_safe
    assert "versions of 2026-04 (34152ae) or later need not" in old.graph_safe_reason
    with pytest.raises(
        ConfigError, match=r"serves groups within one NVLink domain, got 8 ranks, 4 per domain. Install"
    ):
        hybrid.constraints(early, "cuda", shape(), 4)


def test_the_newest_rules_are_those_of_its_class() -> None:
    release = HybridEPOptions(emulate=True).release
    assert release is not None
    assert hybrid.rules(emulated_deep_ep(release).HybridEPBuffer) == hybrid.NEWEST


@pytest.mark.parametrize(
    ("backend", "fields", "size", "text"),
    [
        (V1, {"num_experts": 9}, 3, "'deepep': ep_size must be one of 2, 4, 8, 16, 32, 64, 128, 144, 160, got 3"),
        (V1, {"hidden_size": 384}, 2, "'deepep': hidden_size must be a multiple of 256, got 384"),
        (V1, {"hidden_size": 8192}, 2, "'deepep': hidden_size must be at most 8191, got 8192"),
        (V1, {"num_experts": 258}, 2, "experts per rank must be at most 128, got 129 (258 experts over 2 ranks)"),
        (V2, {"num_experts": 64, "top_k": 33}, 2, "'deepep': top_k must be at most 32, got 33"),
        (HYBRID, {"num_experts": 6}, 2, "experts per rank must be a multiple of 2, got 3 (6 experts over 2 ranks)"),
        (
            HYBRID,
            {"num_experts": 8, "spare_experts_per_rank": 1},
            2,
            "got 5 (8 experts over 2 ranks, spare slots per rank: 1). Change spare_experts_per_rank, ep_size or",
        ),
        (HYBRID, {"hidden_size": 24}, 2, "'hybridep': hidden_size must be a multiple of 16, got 24"),
        ({**HYBRID, "ranks_per_domain": 1}, {"max_tokens_per_rank": 30000}, 2, "at most 21824 rows per rank fit"),
        (HYBRID, {"wire_dtype": "mxfp8"}, 2, "'hybridep': hidden_size must be a multiple of 512, got 256"),
        *(
            (
                backend,
                {"wire_dtype": "mxfp8", "hidden_size": 512},
                2,
                'without grad_wire_dtype. Set grad_wire_dtype="mxfp8"',
            )
            for backend in (HYBRID, {**V2, "ranks_per_node": 1})
        ),
    ],
)
def test_refused_at_build_on_all_ranks_alike(
    backend: dict[str, Any], fields: dict[str, Any], size: int, text: str
) -> None:
    results = outcomes_on(lambda group: build_dispatcher(config(backend, **fields), group), size)
    raises_everywhere(results, ConfigError, text)


def test_an_option_of_later_versions_is_refused(wrap: Wrap) -> None:
    wrap(hybridep_module, "parameters", lambda original, function: original(function) - {"num_blocks_permute"})
    with pytest.raises(ConfigError, match="the installed HybridEPBuffer must have num_blocks_permute, got a version"):
        build_dispatcher(config({**HYBRID, "num_blocks_permute": 8}))


def test_fusion_needs_equal_chunks(variables: Setting) -> None:
    variables(NUM_OF_TOKENS_PER_CHUNK_PREPROCESSING_API="128")
    text = r"fuse_permute needs equal chunks in all kernels, got 64 \(dispatch\), 64 \(combine\) and 128"
    with pytest.raises(ConfigError, match=text):
        build_dispatcher(config({**HYBRID, "fuse_permute": True}))


def test_numbers_can_be_overridden() -> None:
    overrides = {"row_multiple": 192, "max_rows": 400, "hidden_multiple": 128, "group_sizes": [1, 3]}
    given = config(HYBRID, hidden_size=128, constraints=overrides)
    dispatcher = build_dispatcher(given)
    assert dispatcher.plan(like=torch.zeros(5, 128)).sizes.padded_rows == 192
    with pytest.raises(InputError, match="at most 384 rows per rank fit"):
        dispatcher.plan(like=torch.zeros(401, 128))
    dispatcher.close()
    raises_everywhere(outcomes_on(lambda group: build_dispatcher(given, group), 2), ConfigError, "ep_size", "1, 3")


@pytest.mark.parametrize(("backend", "dtype"), [(HYBRID, torch.float32), (V2, torch.float64)], ids=["hybrid", "v2"])
def test_other_dtypes_are_refused_with_the_way_out(backend: dict[str, Any], dtype: torch.dtype) -> None:
    dispatcher = build_dispatcher(config(backend, wire_dtype=None))
    x, routing = torch.ones(4, 256, dtype=dtype), Routing(torch.zeros(4, 2, dtype=torch.int64), torch.ones(4, 2))
    with pytest.raises(InputError, match=rf'x must be torch.bfloat16, got {dtype}. Set wire_dtype="bfloat16", or use'):
        dispatcher.dispatch(x, routing)
    sent = dispatcher.dispatch(x.bfloat16(), routing)
    assert dispatcher.combine(sent.rows.to(dtype), sent).dtype == torch.bfloat16
    with pytest.raises(InputError, match=rf"x must be torch.bfloat16, got {dtype}. Set wire_dtype"):
        dispatcher.dispatch(x, again=sent)
    dispatcher.close()
    wired = build_dispatcher(config(backend))
    assert wired.dispatch(x, routing).rows.dtype == dtype
    wired.close()


def test_where_deepep_is_graph_safe() -> None:
    """v1 within a node; v2 and V2.5 unless it has to sort what it can only find by asking the device."""
    across = deepep(shape(16, 8), emulate="v1.2.1")
    assert not across.graph_safe
    assert "only within a node, that is with up to 8 ranks, got 16" in across.graph_safe_reason
    for v2, where, options in [("v2-2.1.0", shape(16, 8), {}), ("v2.5.0", shape(8, 8), {"expand": True})]:
        assert not deepep(where, emulate=v2, **options).graph_safe
        assert deepep(where, emulate=v2, deterministic=False, **options).graph_safe
