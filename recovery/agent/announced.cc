#include "recovery/agent/announced.h"

#include "recovery/rpc/convert.h"
#include "recovery/swarm/have_feed.h"

namespace rekindle::agent {

namespace {
constexpr std::size_t kMaxRuns = 256;  // a summary: neighbours hear all of it, from us
}

proto::Holding make_holding(const Served& served) {
  const Checkpoint& checkpoint = served.checkpoint();
  const Layout& layout = served.manifest->layout;
  proto::Holding holding;
  *holding.mutable_id() = rpc::to_proto(checkpoint.id);
  *holding.mutable_root() = rpc::to_proto(checkpoint.root);
  *holding.mutable_tensor_set() = rpc::to_proto(checkpoint.tensors.digest());
  *holding.mutable_layout() = rpc::to_proto(layout.digest());
  holding.set_payload_bytes(layout.payload_bytes());
  holding.set_checkpoint_bytes(checkpoint.tensors.total_bytes());
  holding.set_complete(served.complete());
  holding.set_verified(served.verified());
  if (!served.complete()) {
    *holding.mutable_held() =
        rpc::to_proto(swarm::summarize(served.held->snapshot().ranges(), kMaxRuns));
  }
  holding.set_whole(layout.payload_bytes() == checkpoint.tensors.total_bytes());
  if (served.complete() && served.covers != nullptr) {
    *holding.mutable_covers() = rpc::to_proto(*served.covers);
  }
  holding.set_checkpoint_tiles(checkpoint.tiles.tile_count());
  return holding;
}

}  // namespace rekindle::agent
