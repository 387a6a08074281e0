#pragma once

#include <cstdint>
#include <vector>

#include "transport/verbs/direct/op_expander.h"
#include "transport/verbs/direct/send_queue.h"
#include "transport/verbs/link/verbs_path.h"

namespace rekindle::transport::verbs {

// Reads the source's registered regions over one pair of rails. Each op goes to the queue pair with
// the least open bytes.
class DirectPath final : public VerbsPath {
 public:
  DirectPath(VerbsPathParts parts, const ExpandLimits& limits);

 private:
  static constexpr std::uint16_t kNone = 0xffff;
  struct Op {
    ReadOp read;
    OpCursor cursor;
    // The one that its last request read.
    const RemoteWindow* window = nullptr;
    // Its queue counts these bytes as open.
    std::uint64_t bytes = 0;
    std::uint32_t outstanding = 0;
    OpStatus status = OpStatus::kOk;
    // The next op of its queue, while requests of this one are to be posted.
    std::uint16_t next = kNone;
  };
  struct Queue {
    ibv_qp* queue_pair = nullptr;
    SendQueue sent;
    // Ops with requests to be posted, in order.
    std::uint16_t first = kNone;
    std::uint16_t last = kNone;
    std::uint64_t open_bytes = 0;
  };

  void accept(std::uint16_t slot, const ReadOp& op, OpStatus status) override;
  void pump() override;
  void complete(const ibv_wc& completion) override;
  void end_unsent() override;
  void end_outstanding() override;
  std::uint64_t remote_span(RegionKey region, std::uint64_t offset) const override;

  void pump_queue(std::size_t index);
  bool push_request(Queue& queue, std::size_t index);
  void retire(Queue& queue, const SentRequest& request, OpStatus status);
  void finish_if_over(Queue& queue, std::uint16_t slot);
  void leave_queue(Queue& queue);

  const ExpandLimits limits_;
  std::vector<Queue> queues_;          // one per queue pair
  std::vector<Op> ops_;                // by slot
  std::vector<SentRequest> unposted_;  // scratch
  ReadRequest request_;                // scratch
};

}  // namespace rekindle::transport::verbs
