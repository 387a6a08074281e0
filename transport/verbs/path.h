#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "transport/path.h"
#include "transport/rate_limiter.h"
#include "transport/verbs/bounce_pool.h"
#include "transport/verbs/connection.h"
#include "transport/verbs/local_memory.h"
#include "transport/verbs/op_expander.h"
#include "transport/verbs/remote_windows.h"
#include "transport/verbs/send_queue.h"

namespace rekindle::transport::verbs {

struct VerbsPathParts {
  std::unique_ptr<Connection> connection;  // RTS
  RemoteWindows windows;
  std::shared_ptr<BouncePool> bounce;
  std::shared_ptr<const LocalMemory> memory;
  std::shared_ptr<RateLimiter> limiter;  // of the session, all its paths; null: no cap
  std::string description;
  ExpandLimits limits;
};

// One pair of rails. Memory is fixed when it is made: nothing is allocated per op.
class VerbsPath final : public Path, private AddressBook {
 public:
  static constexpr std::size_t kMaxOps = 256;

  explicit VerbsPath(VerbsPathParts parts);
  ~VerbsPath() override;

  Result<std::size_t> post(std::span<const ReadOp> ops) override;
  std::size_t poll(std::span<Completion> out) override;
  void abort() override;
  std::size_t in_flight() const override { return taken_ - reported_; }
  std::uint64_t bytes_landed() const override { return bytes_landed_; }
  int wait_fd() const override { return connection_->event_fd(); }
  bool arm() override;
  std::optional<TimePoint> wake_at() const override;
  std::string_view transport() const override { return "verbs"; }
  std::string describe() const override { return description_; }
  std::string why_broken() const override { return why_broken_; }
  const PollerHome* home() const override { return &home_; }

 private:
  static constexpr std::uint16_t kNone = 0xffff;
  struct Op {
    ReadOp read;
    OpCursor cursor;
    std::uint64_t bytes = 0;  // that its queue counts as open
    std::uint32_t outstanding = 0;
    OpStatus status = OpStatus::kOk;
    std::uint16_t next = kNone;  // in its queue, while it has requests to be posted
  };
  struct Queue {
    ibv_qp* queue_pair = nullptr;
    SendQueue sent;
    std::uint16_t first = kNone;  // ops with requests to be posted, in order
    std::uint16_t last = kNone;
    std::uint64_t open_bytes = 0;  // of its ops
  };

  LocalSpan local(const std::byte* address) const override { return memory_.find(address); }
  std::uint64_t remote_span(RegionKey region, std::uint64_t offset) const override;

  OpStatus check(const ReadOp& op) const;
  void accept(const ReadOp& op);
  void pump();
  void pump(std::size_t index);
  bool push_request(Queue& queue, std::size_t index);
  bool within_rate(ExpandLimits& limits, std::uint64_t wanted, std::uint64_t& granted);
  void wake_by(TimePoint at);
  void stop_if_rail_moved();
  bool drain_completions();
  void complete(const ibv_wc& wc);
  void retire(Queue& queue, const SentRequest& request, OpStatus status);
  OpStatus land(const SentRequest& request);
  void finish_if_over(Queue& queue, std::uint16_t slot);
  void leave_queue(Queue& queue);
  void stop(OpStatus status, std::string why);
  void force_drain();

  const std::string description_;
  const PollerHome home_;
  const RemoteWindows windows_;
  const ExpandLimits limits_;
  const std::shared_ptr<BouncePool> bounce_;
  const std::shared_ptr<RateLimiter> limiter_;
  LocalMemoryView memory_;
  const std::unique_ptr<Connection> connection_;

  std::vector<Queue> queues_;  // one per queue pair
  std::vector<Op> ops_;        // slots
  std::vector<std::uint16_t> free_slots_;
  std::vector<Completion> done_;  // a ring of kMaxOps
  std::size_t done_head_ = 0;
  std::size_t done_count_ = 0;
  std::vector<SentRequest> unposted_;  // scratch
  ReadRequest request_;                // scratch
  std::uint64_t taken_ = 0;
  std::uint64_t reported_ = 0;
  std::uint64_t bytes_landed_ = 0;

  bool armed_ = false;
  OpStatus stopped_ = OpStatus::kOk;  // why nothing more is posted; kOk: it is
  std::string why_broken_;
  TimePoint drain_by_{};
  std::optional<TimePoint> wake_at_;
};

}  // namespace rekindle::transport::verbs
