"""The ranks of an SGLang that serve a model together, and where they attach."""
from __future__ import annotations

from sglang.srt.distributed.parallel_state import get_tp_group, get_world_group
from sglang.srt.runtime_context import get_exec, get_parallel

from .._engines.loading import Held, Place, of_one_generation, said_place
from .._engines.options import Options
from .._engines.ranks import Ranks
from ..errors import InvalidError


def ranks_of(role: str) -> Ranks:
    """Returns all ranks that have a part of the model of this role and load it at the same time.

    A draft is on all ranks of a tensor parallel group: that of the last pipeline stage, or, while
    SGLang makes a draft that is sharded as attention is, the group that shares it."""
    group = get_world_group() if role == "target" else get_tp_group()
    return Ranks(group.rank_in_group, group.world_size, group.all_gather_object)


def joins() -> bool:
    """Whether this process was started to join ranks that serve, and do not answer before that."""
    return bool(get_exec().moe.is_ep_joiner)


def place_of(options: Options, ranks: Ranks, now: Held | None = None) -> Place:
    """Returns this worker's rank in its instance. Each data parallel replica (without data parallel
    attention) is an instance. The generation is later than that of `now`, the held version. All
    ranks call it."""
    said = said_place(options)
    if not said.instance:
        return said
    parallel, instance = get_parallel(), said.instance
    if parallel.dp_rank is not None and parallel.attn_dp_size == 1:
        instance = f"{instance}.dp{parallel.dp_rank}"
    place = Place(instance, said.generation, ranks.rank, ranks.size)
    return of_one_generation(place, ranks, now)


def check_backup() -> None:
    """Raises InvalidError where SGLang keeps its own copy of experts. A process that is no rank
    reads it from files, once, and dies unnoticed with load format rekindle. After an update, the
    copy would bring back experts of the version before."""
    experts = get_exec().moe
    if experts.enable_elastic_expert_backup and experts.elastic_ep_backend is not None:
        raise InvalidError("--enable-elastic-expert-backup keeps experts of files, that Rekindle "
                           "does not update: start the server without it, and experts of ranks "
                           "that are gone come of the version that Rekindle holds")


def check_update() -> None:
    """Raises InvalidError with a backup of experts, or with several pipeline stages. A stage passes
    an update on only after its own is done, so the ranks of all stages could never agree."""
    check_backup()
    stages = get_parallel().pp_size
    if stages > 1:
        raise InvalidError(f"{stages} pipeline stages take an update one after another, and would "
                           "serve two versions: start the server again on the new version")
