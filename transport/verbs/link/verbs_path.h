#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "transport/path.h"
#include "transport/registry.h"
#include "transport/verbs/direct/op_expander.h"
#include "transport/verbs/link/verbs_connection.h"
#include "transport/verbs/link/verbs_wire.h"
#include "transport/verbs/memory/local_memory.h"

namespace rekindle::transport::verbs {

// A connected pair of rails, and the objects that reads over it need.
struct VerbsPathParts {
  // The regions that the path may read.
  RemoteWindows windows;
  std::shared_ptr<BouncePool> bounce;
  std::shared_ptr<const LocalMemory> memory;
  // All paths of a session share it. Null: no cap.
  std::shared_ptr<RateLimiter> limiter;
  std::string description;
  // In RTS. Last, so that its queue pairs go before the memory that they write to.
  std::unique_ptr<Connection> connection;
};

// The slots of a path's ops, and the completions that wait for poll(). One thread uses it. Its
// memory is fixed.
class OpSlots {
 public:
  static constexpr std::size_t kMaxOps = 256;

  OpSlots();
  ~OpSlots();
  OpSlots(const OpSlots&) = delete;
  OpSlots& operator=(const OpSlots&) = delete;

  bool has_room() const { return !free_.empty() && in_flight() < kMaxOps; }
  // The slot of a new op. With room only.
  std::uint16_t take();
  // The op of this slot is over.
  void report(std::uint16_t slot, std::uint64_t wr_id, OpStatus status);
  // Moves completions to `out` and returns how many.
  std::size_t poll(std::span<Completion> out);

  // Taken and not polled yet.
  std::size_t in_flight() const { return taken_ - polled_; }
  // Reported and not polled yet.
  std::size_t done() const { return done_count_; }

 private:
  std::vector<std::uint16_t> free_;
  std::vector<Completion> done_;  // a ring of kMaxOps
  std::size_t done_head_ = 0;
  std::size_t done_count_ = 0;
  std::uint64_t taken_ = 0;
  std::uint64_t polled_ = 0;
};

// The status of an op whose request failed on a path that has `stopped` (kOk: it runs). `own`
// follows from the request's status alone.
OpStatus failure_status(ibv_wc_status status, OpStatus own, OpStatus stopped);

// The part of an RDMA path that does not depend on how the bytes are read: it takes ops into slots,
// reports their completions, keeps to the rate, waits for the device, and ends. DirectPath reads
// the source's regions; StagedPath reads blocks that the source fills. One poller thread uses a
// path. Its memory is fixed when it is made: nothing is allocated per op.
class VerbsPath : public Path, protected AddressBook {
 public:
  static constexpr std::size_t kMaxOps = OpSlots::kMaxOps;

  Result<std::size_t> post(std::span<const ReadOp> ops) final;
  std::size_t poll(std::span<Completion> out) final;
  void abort() final { stop(OpStatus::kAborted, {}); }
  std::size_t in_flight() const final { return op_slots_.in_flight(); }
  std::uint64_t bytes_landed() const final { return bytes_landed_; }
  int wait_fd() const final { return parts_.connection->event_fd(); }
  bool arm() final;
  std::optional<TimePoint> wake_at() const final;
  std::string_view transport() const final { return "verbs"; }
  std::string describe() const final { return parts_.description; }
  std::string why_broken() const final { return why_broken_; }
  const PollerHome* home() const final { return &home_; }

 protected:
  explicit VerbsPath(VerbsPathParts parts);

  // --- the steps of a kind of path
  // Takes an op into `slot`. `status` is kOk, or the reason why the op cannot be read: it is to be
  // reported then.
  virtual void accept(std::uint16_t slot, const ReadOp& op, OpStatus status) = 0;
  // Sends as much as there is room for.
  virtual void pump() = 0;
  virtual void complete(const ibv_wc& completion) = 0;
  // The path has stopped: reports every op that no request of the NIC can touch.
  virtual void end_unsent() = 0;
  // The queue pairs are gone: reports all ops that are left.
  virtual void end_outstanding() = 0;

  // --- the tools of these steps
  bool running() const { return stopped_ == OpStatus::kOk; }
  // Why nothing more is sent; kOk while the path runs.
  OpStatus stopped() const { return stopped_; }
  LocalSpan local(const std::byte* address) const final { return memory_.find(address); }

  // Bytes of a request have arrived: copies them home if they were bounced.
  OpStatus land(const ReadOp& op, const ReadRequest& request, const std::byte* block);
  void count_landed(std::uint64_t bytes) { bytes_landed_ += bytes; }
  // How many of `wanted` bytes the session's rate lets through now. 0: poll() is due when it does.
  // With parts_.limiter only.
  std::uint64_t take_rate(std::uint64_t wanted);
  // Without data when all blocks are in use. poll() is due again soon then.
  BouncePool::Block acquire_block();
  void wake_by(TimePoint at) { wake_at_ = std::min(wake_at_.value_or(at), at); }
  void stop(OpStatus status, std::string why);
  // The device will not report some requests: the next poll() destroys the queue pairs.
  void drain_by_force() { drain_by_ = {}; }

  const VerbsPathParts parts_;
  OpSlots op_slots_;

 private:
  void pump_if_running();
  bool drain_completions();
  void stop_if_rail_moved();

  const PollerHome home_;
  LocalMemoryView memory_;

  std::uint64_t bytes_landed_ = 0;

  bool armed_ = false;
  OpStatus stopped_ = OpStatus::kOk;
  std::string why_broken_;
  TimePoint drain_by_{};
  std::optional<TimePoint> wake_at_;
};

}  // namespace rekindle::transport::verbs
