#include "transport/verbs/direct/send_queue.h"

#include <algorithm>
#include <bit>

namespace rekindle::transport::verbs {

SendQueue::SendQueue(std::uint32_t tag, std::uint32_t depth, std::uint32_t first)
    : tag_(tag),
      depth_(depth),
      mask_(std::bit_ceil(depth) - 1),
      sent_(std::bit_ceil(depth)),
      head_(first),
      tail_(first) {}

void SendQueue::add(std::uint16_t op, const ReadRequest& request, BouncePool::Block block,
                    std::uint64_t remote_address, std::uint32_t rkey, bool last) {
  SentRequest& sent = at(tail_);
  sent.op = op;
  sent.bounced = request.bounced;
  sent.wire_bytes = request.wire_bytes;
  sent.payload_bytes = request.payload_bytes;
  sent.payload_offset = request.payload_offset;
  sent.block = block;
  auto& sges = sges_[chain_];
  auto& wr = requests_[chain_];
  wr.next = nullptr;
  const std::uint32_t entries = request.bounced ? 1 : request.sge_count;
  if (request.bounced) {
    sges[0] = {reinterpret_cast<std::uint64_t>(block.data), request.wire_bytes, block.lkey};
  } else {
    for (std::uint32_t i = 0; i < entries; ++i) sges[i] = request.sges[i];
  }
  wr.num_sge = static_cast<int>(entries);
  wr.sg_list = sges.data();
  wr.wr_id = std::uint64_t{tag_} << kTagShift | tail_;
  wr.opcode = IBV_WR_RDMA_READ;
  wr.wr.rdma.remote_addr = remote_address;
  wr.wr.rdma.rkey = rkey;
  wr.send_flags = 0;
  unsignalled_bytes_ += request.wire_bytes;
  if (last || unsignalled_bytes_ >= kSignalledBytes) {
    wr.send_flags = IBV_SEND_SIGNALED;
    unsignalled_bytes_ = 0;
  }
  if (chain_ > 0) requests_[chain_ - 1].next = &wr;
  ++chain_;
  ++tail_;
}

int SendQueue::flush(Api& api, ibv_qp* queue_pair, std::vector<SentRequest>& unposted) {
  if (chain_ == 0) return 0;
  requests_[chain_ - 1].send_flags = IBV_SEND_SIGNALED;
  unsignalled_bytes_ = 0;
  ibv_send_wr* bad = nullptr;
  const int error = api.post_send(queue_pair, requests_.data(), &bad);
  if (error != 0) {
    const std::size_t posted =
        bad == nullptr ? 0 : static_cast<std::size_t>(bad - requests_.data());
    silent_ = posted > 0 && (requests_[posted - 1].send_flags & IBV_SEND_SIGNALED) == 0;
    for (; chain_ > posted; --chain_) unposted.push_back(at(--tail_));
  }
  chain_ = 0;
  return error;
}

}  // namespace rekindle::transport::verbs
