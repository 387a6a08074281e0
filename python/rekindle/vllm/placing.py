"""The place of a worker in vLLM: the ranks with which it loads, and its rank in an instance.

Ranks agree through the groups of vLLM's own workers, which are alike in the oldest and the newest
supported version.
"""
from __future__ import annotations

from typing import Any

from .._engines import loading
from .._engines.loading import Place, said_place
from .._engines.options import Options
from .._engines.ranks import ONE, Ranks


def role_of(model_config: Any) -> str:
    """"draft" for the model of a speculative decoder, else "target"."""
    return "draft" if getattr(model_config, "runner_type", None) == "draft" else "target"


def ranks_of(role: str) -> Ranks:
    """Returns all workers whose models of this role are parts of one.

    For a mixture of experts, vLLM's world has all data parallel replicas, because they spread their
    experts over replicas, by expert or by tensor parallelism. Replicas of other models have
    separate worlds. Only the last pipeline stage has a draft."""
    from vllm.distributed import parallel_state
    if role == "target":
        return _ranks(parallel_state.get_world_group())
    try:
        return _ranks(parallel_state.get_ep_group())
    except AssertionError:
        # A model without experts has no such group.
        return _ranks(parallel_state.get_tp_group())


def _ranks(group: Any) -> Ranks:
    if group.world_size == 1:
        return ONE

    def gather(value: Any) -> list[Any]:
        import torch.distributed
        if hasattr(group, "tcp_store_group"):  # elastic: not of torch's world
            return list(group.tcp_store_group.all_gather_obj(value))
        values: list[Any] = [None] * group.world_size
        torch.distributed.all_gather_object(values, value, group=group.cpu_group)
        return values

    return Ranks(group.rank_in_group, group.world_size, gather)


def place_of(parallel: Any, options: Options, role: str = "target") -> Place:
    """Returns this worker's rank in its instance. Each data parallel replica is an instance, and
    each rank of a draft is one. The generation is None where neither options nor environment give
    it."""
    said = said_place(options)
    if not said.instance:
        return said
    instance = said.instance
    if parallel.data_parallel_index > 0:
        # Also true for replicas that do not know of each other.
        instance = f"{instance}.dp{parallel.data_parallel_index}"
    world = (parallel.tensor_parallel_size * parallel.pipeline_parallel_size
             * parallel.prefill_context_parallel_size)
    # An external launcher numbers the ranks of all replicas consecutively.
    rank = parallel.rank % world
    if role == "draft":
        # The configuration of a draft may not tell replicas apart.
        target = loading.held("target")
        if target is not None and target.place.instance:
            instance = target.place.instance
        return Place(f"{instance}.draft{rank}", said.generation, 0, 1)
    return Place(instance, said.generation, rank, world)
