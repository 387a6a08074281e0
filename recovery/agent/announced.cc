#include "recovery/agent/announced.h"

#include "recovery/rpc/convert.h"

namespace rekindle::agent {

proto::Holding make_holding(const store::StoredVersion& stored) {
  const Checkpoint& checkpoint = *stored.manifest.checkpoint;
  const Layout& layout = stored.manifest.layout;
  proto::Holding holding;
  *holding.mutable_id() = rpc::to_proto(checkpoint.id);
  *holding.mutable_root() = rpc::to_proto(checkpoint.root);
  *holding.mutable_tensor_set() = rpc::to_proto(checkpoint.tensors.digest());
  *holding.mutable_layout() = rpc::to_proto(layout.digest());
  holding.set_payload_bytes(layout.payload_bytes());
  holding.set_checkpoint_bytes(checkpoint.tensors.total_bytes());
  holding.set_complete(true);
  holding.set_whole(layout.payload_bytes() == checkpoint.tensors.total_bytes());
  return holding;
}

}  // namespace rekindle::agent
