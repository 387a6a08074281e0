#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "transport/verbs/link/verbs_path.h"
#include "transport/verbs/link/verbs_wire.h"
#include "transport/verbs/staged/part_queue.h"
#include "transport/verbs/staged/stage_pool.h"
#include "transport/verbs/staged/stage_wire.h"

namespace rekindle::transport::verbs {

// How many blocks a link with this send queue could have open; 0: none.
std::uint32_t stage_blocks_for(std::uint32_t send_depth);

// Reads from a source that gathers what is asked for into blocks (docs/internals/verbs.md, "Staged
// serving"), over one queue pair. A request names the runs; after its answer the block is READ.
class StagedPath final : public VerbsPath {
 public:
  // `parts.windows` is ignored: the offer has the regions. `stale`: regions that the source serves
  // no more.
  static Result<std::unique_ptr<StagedPath>> create(VerbsPathParts parts, StageOffer offer,
                                                    std::vector<RegionKey> stale);
  ~StagedPath() override;

  // Before the path is used: reads a few bytes, to see that the link works both ways.
  Result<void> prove(TimePoint deadline);

 private:
  // A wr_id: sequence, kind, slot.
  static constexpr int kKindShift = 16;
  static constexpr int kSequenceShift = 32;
  enum class Kind : std::uint8_t { kReceive, kRequest, kRead, kPing };
  // A block of the source, and the part that is on its way through it.
  struct Slot {
    enum class State : std::uint8_t { kFree, kAsked, kAnswered, kReading } state = State::kFree;
    // Its request is in the send queue.
    bool sending = false;
    std::uint32_t sequence = 0;
    TimePoint asked_at{};
    PartQueue::Part part;
    ReadRequest landing;
    BouncePool::Block bounce;
  };
  StagedPath(VerbsPathParts parts, StageOffer offer, std::unique_ptr<StageControl> control);

  void accept(std::uint16_t slot, const ReadOp& op, OpStatus status) override;
  void pump() override;
  void complete(const ibv_wc& completion) override;
  void end_unsent() override;
  void end_outstanding() override;
  std::uint64_t remote_span(RegionKey, std::uint64_t) const override { return ~std::uint64_t{0}; }

  bool ask(std::size_t index);
  void read_block(std::size_t index);
  void plan_landing(Slot& slot);
  void watch_silence();
  bool post_receive(std::size_t index);
  bool post_send(Kind kind, std::size_t index, std::uint32_t sequence, ibv_send_wr& request);
  void take_answer(std::size_t index, std::size_t bytes);
  OpStatus land_part(const Slot& slot);
  void end_part(Slot& slot, OpStatus status);

  const StageOffer offer_;
  const StageLimits limits_;
  const std::unique_ptr<StageControl> control_;
  std::vector<Slot> slots_;  // by block
  PartQueue queue_;
  std::uint32_t sequence_ = 0;
  bool proving_ = false;
  bool pinging_ = false;
  TimePoint heard_at_{};
};

}  // namespace rekindle::transport::verbs
