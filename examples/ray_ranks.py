"""Run two ranks as Ray actors: ``python examples/ray_ranks.py``."""

from __future__ import annotations

import socket

import ray
import torch
import torch.distributed as dist

from moe_dispatch import DispatcherConfig, Routing, build_dispatcher


class Rank:
    def address(self) -> str:
        with socket.socket() as free:
            free.bind(("", 0))
            return f"tcp://{ray.util.get_node_ip_address()}:{free.getsockname()[1]}"

    def join(self, address: str, rank: int, size: int) -> str:
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=size)
        config = DispatcherConfig.load(num_experts=8, top_k=2, hidden_size=16)
        self.dispatcher = build_dispatcher(config, dist.group.WORLD)
        self.dispatcher.self_test()
        return self.dispatcher.backend_name

    def step(self, tokens: int) -> tuple[float, list[int]]:
        x = torch.ones(tokens, 16)
        ids = torch.tensor([[0, 7]]).expand(tokens, 2)
        sent = self.dispatcher.dispatch(x, Routing(ids, torch.full((tokens, 2), 0.5)))
        y = self.dispatcher.combine(2 * sent.rows, sent)
        return y.sum().item(), sent.real_tokens_per_expert.tolist()

    def leave(self) -> None:
        self.dispatcher.close()
        dist.destroy_process_group()


def main() -> None:
    ray.init(num_cpus=2, include_dashboard=False, runtime_env={"env_vars": {"MOE_DISPATCH_BACKEND": "alltoall"}})
    placed = ray.util.placement_group([{"CPU": 1}] * 2)  # all ranks or none
    ray.get(placed.ready())
    strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(placed)
    actor = ray.remote(num_cpus=1)(Rank)
    ranks = [actor.options(scheduling_strategy=strategy).remote() for _ in range(2)]
    address = ray.get(ranks[0].address.remote())
    print(ray.get([rank.join.remote(address, index, 2) for index, rank in enumerate(ranks)]))
    print(ray.get([rank.step.remote(3 * index) for index, rank in enumerate(ranks)]))  # call all, then wait
    ray.get([rank.leave.remote() for rank in ranks])
    ray.shutdown()


if __name__ == "__main__":
    main()
