#include "transport/verbs/direct/send_queue.h"

#include <algorithm>
#include <bit>

namespace rekindle::transport::verbs {
namespace {

constexpr int kTagShift = 32;

}  // namespace

SendQueue::SendQueue(std::uint32_t tag, std::uint32_t depth, std::uint32_t first)
    : tag_(tag),
      depth_(depth),
      mask_(std::bit_ceil(depth) - 1),
      sent_(std::bit_ceil(depth)),
      head_(first),
      tail_(first) {}

void SendQueue::add(const SentRequest& sent, const ReadRequest& request,
                    std::uint64_t remote_address, std::uint32_t rkey, bool last) {
  at(tail_) = sent;
  auto& sges = sges_[chain_];
  auto& wr = requests_[chain_];
  wr = {};
  if (sent.bounced) {
    sges[0] = {reinterpret_cast<std::uint64_t>(sent.block.data), request.wire_bytes,
               sent.block.lkey};
    wr.num_sge = 1;
  } else {
    std::copy_n(request.sges.begin(), request.sge_count, sges.begin());
    wr.num_sge = static_cast<int>(request.sge_count);
  }
  wr.sg_list = sges.data();
  wr.wr_id = std::uint64_t{tag_} << kTagShift | tail_;
  wr.opcode = IBV_WR_RDMA_READ;
  wr.wr.rdma.remote_addr = remote_address;
  wr.wr.rdma.rkey = rkey;
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

std::optional<SentRequest> SendQueue::retire(std::uint64_t wr_id, bool& is_last) {
  const auto position = static_cast<std::uint32_t>(wr_id);
  // The position is not out: a completion of an earlier queue pair.
  if (wr_id >> kTagShift != tag_ || position - head_ >= tail_ - head_) return std::nullopt;
  is_last = position == head_;
  return at(head_++);
}

std::optional<SentRequest> SendQueue::drop() {
  if (head_ == tail_) return std::nullopt;
  return at(head_++);
}

}  // namespace rekindle::transport::verbs
