#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "transport/verbs/direct/op_expander.h"
#include "transport/verbs/memory/local_memory.h"

// The requests that are out on one queue pair, in order. One thread uses it.
namespace rekindle::transport::verbs {

// A request that was posted and is not reported yet.
struct SentRequest {
  std::uint16_t op = 0;  // slot
  bool bounced = false;
  std::uint32_t wire_bytes = 0;
  std::uint32_t payload_bytes = 0;
  std::uint64_t payload_offset = 0;
  BouncePool::Block block;
};

// Collects READs and posts them in chains. A completion names a position: every request up to it
// has ended. The status is that of the last one. Those before it went well, or they would have had
// completions of their own. The last request of a chain is always signalled. So no request that is
// out waits for requests that may never be posted, for example for want of the bounce blocks that
// it holds.
class SendQueue {
 public:
  // `tag` is the upper half of every wr_id. `first` is the first position, for tests.
  SendQueue(std::uint32_t tag, std::uint32_t depth, std::uint32_t first = 0);

  bool full() const { return tail_ - head_ == depth_; }
  std::size_t outstanding() const { return tail_ - head_; }
  bool chain_full() const { return chain_ == kChain; }

  // Adds a request of an op to the chain. Neither full() nor chain_full(). `block`: where a bounced
  // request lands. `last`: it is the op's last one.
  void add(std::uint16_t op, const ReadRequest& request, BouncePool::Block block,
           std::uint64_t remote_address, std::uint32_t rkey, bool last);
  // Posts the chain and returns 0 or an errno. After an error, requests that were not posted leave
  // the queue and are handed to `unposted`; the others are out.
  int flush(Api& api, ibv_qp* queue_pair, std::vector<SentRequest>& unposted);

  // Takes the oldest request up to the position of a wr_id. Call it until `is_last` is set: that
  // request is the completion's own. The result is valid until the next add(). nullptr: the
  // completion belongs to no request.
  const SentRequest* retire(std::uint64_t wr_id, bool& is_last) {
    const auto position = static_cast<std::uint32_t>(wr_id);
    // The position is not out: a completion of an earlier queue pair.
    if (wr_id >> kTagShift != tag_ || position - head_ >= tail_ - head_) return nullptr;
    is_last = position == head_;
    return &at(head_++);
  }
  // Takes the oldest request. For use after the queue pair is gone. nullptr: there is none.
  const SentRequest* drop() { return head_ == tail_ ? nullptr : &at(head_++); }
  // A failed post has taken requests that are not signalled: no completion will come if they go
  // well.
  bool silent() const { return silent_; }

 private:
  static constexpr std::size_t kChain = 16;
  static constexpr int kTagShift = 32;
  // A request is signalled at least every so many bytes.
  static constexpr std::uint32_t kSignalledBytes = 1 << 20;

  SentRequest& at(std::uint32_t position) { return sent_[position & mask_]; }

  const std::uint32_t tag_;
  const std::uint32_t depth_;
  // Positions wrap around, which works with powers of two only.
  const std::uint32_t mask_;
  std::vector<SentRequest> sent_;  // a ring
  std::uint32_t head_;             // positions, running
  std::uint32_t tail_;
  std::uint64_t unsignalled_bytes_ = 0;
  std::size_t chain_ = 0;
  bool silent_ = false;
  std::array<ibv_send_wr, kChain> requests_{};
  std::array<std::array<ibv_sge, kMaxSge>, kChain> sges_{};
};

}  // namespace rekindle::transport::verbs
