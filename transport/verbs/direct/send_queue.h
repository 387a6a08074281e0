#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "transport/verbs/direct/op_expander.h"
#include "transport/verbs/memory/bounce_pool.h"

// The requests that are out on one queue pair, in order. One thread.
namespace rekindle::transport::verbs {

// A request that was posted and not reported.
struct SentRequest {
  std::uint16_t op = 0;  // slot
  bool bounced = false;
  std::uint32_t wire_bytes = 0;
  std::uint32_t payload_bytes = 0;
  std::uint64_t payload_offset = 0;
  BouncePool::Block block;
};

// Collects READs and posts them in chains. A completion names a position: everything up to it has
// ended, and only it says how; what came before it went well, or it would have had one of its own.
// The last request of a chain is signalled, whatever it is: nothing that is out waits for requests
// that may never be posted (for want of the bounce blocks that it holds, or because of a rate).
class SendQueue {
 public:
  // `tag`: in the upper half of every wr_id. `first`: its first position, for tests.
  SendQueue(std::uint32_t tag, std::uint32_t depth, std::uint32_t first = 0);

  bool full() const { return tail_ - head_ == depth_; }
  std::size_t outstanding() const { return tail_ - head_; }
  bool chain_full() const { return chain_ == kChain; }

  // Adds a request to the chain; neither full() nor chain_full(). `last`: of its op.
  void add(const SentRequest& sent, const ReadRequest& request, std::uint64_t remote_address,
           std::uint32_t rkey, bool last);
  // Posts the chain. On an error (errno) what was not posted is gone from the queue and handed to
  // `unposted`, the rest is out.
  int flush(Api& api, ibv_qp* queue_pair, std::vector<SentRequest>& unposted);

  // The oldest request up to the position of a wr_id, in turn; nothing when there is none left.
  // Sets `is_last` for the one that the completion is about.
  std::optional<SentRequest> retire(std::uint64_t wr_id, bool& is_last);
  // The oldest one, whatever it is: after the queue pair is gone.
  std::optional<SentRequest> drop();
  // A post that failed took requests that nobody will hear of when they go well.
  bool silent() const { return silent_; }

 private:
  static constexpr std::size_t kChain = 16;
  static constexpr std::uint32_t kSignalledBytes = 1 << 20;  // at least this often

  SentRequest& at(std::uint32_t position) { return sent_[position & mask_]; }

  const std::uint32_t tag_;
  const std::uint32_t depth_;
  const std::uint32_t mask_;       // positions wrap around, which only powers of two survive
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
