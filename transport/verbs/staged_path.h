#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "transport/path.h"
#include "transport/rate_limiter.h"
#include "transport/verbs/bounce_pool.h"
#include "transport/verbs/connection.h"
#include "transport/verbs/local_memory.h"
#include "transport/verbs/op_expander.h"
#include "transport/verbs/remote_windows.h"
#include "transport/verbs/stage_control.h"
#include "transport/verbs/stage_wire.h"
#include "transport/verbs/wire.h"

namespace rekindle::transport::verbs {

struct StagedPathParts {
  std::unique_ptr<Connection> connection;  // RTS, one queue pair
  StageOffer stage;
  std::vector<RegionKey> stale;
  std::shared_ptr<BouncePool> bounce;
  std::shared_ptr<const LocalMemory> memory;
  std::shared_ptr<RateLimiter> limiter;  // of the session, all its paths; null: no cap
  std::string description;
};

// How many blocks a link with this send queue could have open; 0: none.
std::uint32_t stage_blocks_for(std::uint32_t send_depth);

// One pair of rails, to a source that gathers what is asked for into blocks (docs/verbs.md, "Staged
// serving"). Memory is fixed when it is made: nothing is allocated per op.
class StagedPath final : public Path, private AddressBook {
 public:
  static constexpr std::size_t kMaxOps = 256;

  static Result<std::unique_ptr<StagedPath>> create(StagedPathParts parts);
  ~StagedPath() override;

  // Before it is used: a few bytes, to see that the way works both ways.
  Result<void> prove(TimePoint deadline);

  Result<std::size_t> post(std::span<const ReadOp> ops) override;
  std::size_t poll(std::span<Completion> out) override;
  void abort() override { stop(OpStatus::kAborted, {}); }
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
  // A wr_id: sequence, kind, slot.
  static constexpr int kKindShift = 16;
  static constexpr int kSequenceShift = 32;
  enum class Kind : std::uint8_t { kReceive, kRequest, kRead, kPing };
  struct Op {
    ReadOp read;
    std::uint64_t position = 0;  // payload bytes that were asked for
    std::uint64_t total = 0;
    std::uint32_t outstanding = 0;  // parts
    OpStatus status = OpStatus::kOk;
    std::uint16_t next =
        kNone;  // in the queue, while it has parts to be asked for; then in its slot
  };
  // A part of an op, on its way through one block.
  struct Slot {
    enum class State : std::uint8_t { kFree, kAsked, kAnswered, kReading } state = State::kFree;
    bool sending = false;      // its request is in the send queue
    std::uint16_t op = kNone;  // the first of `op_count`
    std::uint16_t op_count = 0;
    std::uint32_t sequence = 0;
    TimePoint asked_at{};
    ReadOp part;
    ReadRequest landing;
    BouncePool::Block bounce;
  };
  StagedPath(StagedPathParts parts, std::unique_ptr<StageControl> control, RemoteWindows regions);

  LocalSpan local(const std::byte* address) const override { return memory_.find(address); }
  std::uint64_t remote_span(RegionKey, std::uint64_t) const override { return ~std::uint64_t{0}; }

  OpStatus check(const ReadOp& op) const;
  void accept(const ReadOp& op);
  void pump();
  bool ask(std::size_t index);
  void take_parts(Slot& slot, std::uint64_t max_bytes);
  bool continues(const ReadOp& part, const Op& op) const;
  void read_block(std::size_t index);
  void plan_landing(Slot& slot);
  void watch_silence();
  void wake_by(TimePoint at);
  bool post_receive(std::size_t index);
  bool post_send(Kind kind, std::size_t index, std::uint32_t sequence, ibv_send_wr& request);
  bool drain_completions();
  void complete(const ibv_wc& wc);
  void take_answer(std::size_t index, std::size_t bytes);
  void end_part(Slot& slot, OpStatus status);
  OpStatus land(const Slot& slot);
  void leave_queue();
  void finish_if_over(std::uint16_t slot);
  void stop(OpStatus status, std::string why);
  void force_drain();

  const std::string description_;
  const PollerHome home_;
  const StageOffer stage_;
  const RemoteWindows regions_;  // for their sizes
  const StageLimits limits_;
  const std::shared_ptr<BouncePool> bounce_;
  const std::shared_ptr<RateLimiter> limiter_;
  LocalMemoryView memory_;
  const std::unique_ptr<StageControl> control_;
  const std::unique_ptr<Connection> connection_;  // goes before what it writes to

  std::vector<Slot> slots_;
  std::vector<Op> ops_;
  std::vector<std::uint16_t> free_ops_;
  std::uint16_t first_ = kNone;  // ops with parts to be asked for, in order
  std::uint16_t last_ = kNone;
  std::vector<Completion> done_;  // a ring of kMaxOps
  std::size_t done_head_ = 0;
  std::size_t done_count_ = 0;
  std::uint64_t taken_ = 0;
  std::uint64_t reported_ = 0;
  std::uint64_t bytes_landed_ = 0;
  std::uint32_t sequence_ = 0;

  bool armed_ = false;
  bool proving_ = false;
  bool pinging_ = false;
  TimePoint heard_at_{};
  OpStatus stopped_ = OpStatus::kOk;  // why nothing more is asked for; kOk: it is
  std::string why_broken_;
  TimePoint drain_by_{};
  std::optional<TimePoint> wake_at_;
};

}  // namespace rekindle::transport::verbs
