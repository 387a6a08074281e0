"""The ranks of a SGLang that serve a model together, and where they attach."""
from __future__ import annotations

from sglang.srt.distributed.parallel_state import get_world_group
from sglang.srt.runtime_context import get_parallel

from .._engines.loading import Held, Place, of_one_generation, said_place
from .._engines.options import Options
from .._engines.ranks import ONE, Ranks
from ..errors import InvalidError


def ranks_of(role: str) -> Ranks:
    """Tensor and pipeline parallel; a draft model may be on some of them only."""
    if role != "target":
        return ONE
    group = get_world_group()
    return Ranks(group.rank_in_group, group.world_size, group.all_gather_object)


def place_of(options: Options, ranks: Ranks, now: Held | None = None) -> Place:
    """This worker's rank in its instance; of replicas (data parallel, without attention's) each is
    an instance. Of a later generation than `now`, what is held. All ranks call it."""
    said = said_place(options)
    if not said.instance:
        return said
    parallel, instance = get_parallel(), said.instance
    if parallel.dp_rank is not None and parallel.attn_dp_size == 1:
        instance = f"{instance}.dp{parallel.dp_rank}"
    place = Place(instance, said.generation, ranks.rank, ranks.size)
    return of_one_generation(place, ranks, now)


def check_update() -> None:
    """InvalidError where ranks are told of an update one after another: SGLang's pipeline stages
    pass a request on when they have carried it out, and could never agree."""
    stages = get_parallel().pp_size
    if stages > 1:
        raise InvalidError(f"{stages} pipeline stages take an update one after another, and would "
                           "serve two versions: start the server again on the new version")
