"""A table, cut by any layout and parallelism, holds the ids of every row, and every entry exactly once."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_dispatch.replay import RoutingTable
from moe_dispatch.replay.entries import stored
from tests.replay.samples import draw_case


@pytest.mark.slow
@settings(max_examples=1000, deadline=None)
@given(st.integers(0, 2**32))
def test_every_cut_and_back(seed: int) -> None:
    drawn = draw_case(seed)
    table = drawn.table()
    back = RoutingTable.unknown(table.lengths, table.layers, table.top_k, table.num_experts)
    met_NL = torch.zeros(len(back.stored_NLK), len(table.layers), dtype=torch.int64)
    expected = [drawn.expected(i) for i in range(len(drawn.ids))]
    first_rows = [table.rows_of(name).start for name in drawn.names]
    numbers = [torch.arange(len(ids)).view(-1, 1) + first for ids, first in zip(drawn.ids, first_rows, strict=True)]
    for micro_batch in drawn.micro_batches:
        names = [drawn.names[i] for i in micro_batch]
        for cp_rank, tp_rank in ((cp_rank, tp_rank) for cp_rank in range(drawn.cp) for tp_rank in range(drawn.tp)):
            layout = drawn.layout(micro_batch).shard(cp_rank, drawn.cp, drawn.kind).shard(tp_rank, drawn.tp)
            wanted = drawn.rows(micro_batch, expected, cp_rank, tp_rank)
            row_T = drawn.rows(micro_batch, numbers, cp_rank, tp_rank).reshape(-1)
            shape, wanted_TLK = (*wanted.shape[:-2], 1), wanted.reshape(-1, *wanted.shape[-2:])
            real = row_T >= 0
            for stage in drawn.stages:
                cut = table.cut(layout, names, like=shape, layers=stage, step=3)
                ids_TLK = torch.stack([cut.routing_for(layer) for layer in stage], 1)
                assert torch.equal(ids_TLK, wanted_TLK[:, stage])
                assert torch.equal(cut.routing_for(stage[0]), ids_TLK[:, 0])  # as a recomputed forward looks it up
                back.put(row_T[real], stage, stored(ids_TLK[real], table.num_experts))
                met_NL[row_T[real].unsqueeze(1), torch.tensor(stage)] += 1
    assert torch.equal(back.stored_NLK, table.stored_NLK)
    assert torch.equal(met_NL, torch.ones_like(met_NL))
    table.check_used()
