#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "transport/read_op.h"

// How the ops of a staged path are cut into parts that fit a block. Pure.
namespace rekindle::transport::verbs {

// The op with as few runs as possible: runs that touch each other at both ends are one.
ReadOp with_merged_runs(const ReadOp& op);

// The next part of an op that fits `max_bytes` (at least 1), from payload byte `position` on: whole
// runs, or a piece of one run. Its remote side is dense in the block that it is gathered into.
ReadOp next_part(const ReadOp& op, std::uint64_t position, std::uint64_t max_bytes);

// The ops of one staged path, by slot, and how far each has been asked for. An op is over when all
// its parts are, or when one of them has failed and none is outstanding.
//
// `Report` is called with the slot, the wr_id and the status of each op that is over.
class PartQueue {
 public:
  static constexpr std::uint16_t kNone = 0xffff;
  // A part of one op, or several whole ops that continue each other. These share their fate.
  struct Part {
    ReadOp read;
    std::uint16_t first_op = kNone;
    std::uint16_t op_count = 0;
  };

  explicit PartQueue(std::size_t slots) : ops_(slots) {}

  // The op has something to read and fits its region.
  void add(std::uint16_t slot, const ReadOp& op);
  bool empty() const { return first_ == kNone; }
  // How much of `max_bytes` the next part can need. Not empty().
  std::uint64_t bytes_wanted(std::uint64_t max_bytes) const;
  // The next part of the first op, together with the whole ops after it that continue its runs: a
  // message costs as much as some KiB on the wire. Not empty().
  Part take(std::uint64_t max_bytes);

  template <typename Report>
  void end(const Part& part, OpStatus status, const Report& report) {
    std::uint16_t slot = part.first_op;
    for (std::uint16_t left = part.op_count; left > 0; --left) {
      Op& op = ops_[slot];
      const std::uint16_t next = op.next;
      --op.outstanding;
      if (op.status == OpStatus::kOk) op.status = status;
      // The rest of a failed op is not asked for. Only the first op of the queue has parts.
      if (op.status != OpStatus::kOk && first_ == slot) leave();
      report_if_over(slot, report);
      slot = next;
    }
  }
  // Nothing more is asked for.
  template <typename Report>
  void end_rest(OpStatus status, const Report& report) {
    while (!empty()) {
      const std::uint16_t slot = first_;
      leave();
      if (ops_[slot].status == OpStatus::kOk) ops_[slot].status = status;
      report_if_over(slot, report);
    }
  }

 private:
  struct Op {
    ReadOp read;
    // Payload bytes that were asked for.
    std::uint64_t position = 0;
    std::uint64_t total = 0;
    std::uint32_t outstanding = 0;  // parts
    OpStatus status = OpStatus::kOk;
    // In the queue while parts of it are to be asked for, then in its part.
    std::uint16_t next = kNone;
  };

  static bool continues(const ReadOp& part, const ReadOp& read);
  void leave() {
    first_ = std::exchange(ops_[first_].next, kNone);
    if (first_ == kNone) last_ = kNone;
  }
  template <typename Report>
  void report_if_over(std::uint16_t slot, const Report& report) const {
    const Op& op = ops_[slot];
    if (op.outstanding > 0 || (op.status == OpStatus::kOk && op.position < op.total)) return;
    report(slot, op.read.wr_id, op.status);
  }

  std::vector<Op> ops_;
  // Ops with parts to be asked for, in order.
  std::uint16_t first_ = kNone;
  std::uint16_t last_ = kNone;
};

}  // namespace rekindle::transport::verbs
