#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "transport/read_op.h"
#include "transport/verbs/device/verbs_api.h"
#include "transport/verbs/direct/read_costs.h"

// Turns a strided ReadOp into work requests, one at a time. Pure, without allocation.
namespace rekindle::transport::verbs {

inline constexpr std::uint32_t kMaxSge = 16;

struct ExpandLimits {
  // The most bytes of a work request, and of one that lands in a bounce block.
  std::uint32_t request_bytes = 1 << 20;
  std::uint32_t bounce_bytes = 256 << 10;
  std::uint32_t max_sge = kMaxSge;  // at most kMaxSge
  ReadCosts costs;
};

// Bytes from some address on that share a key. 0 bytes: the address is not registered.
struct LocalSpan {
  std::uint32_t lkey = 0;
  std::uint64_t bytes = 0;
};

// The registered memory of both ends, as one rail knows it.
class AddressBook {
 public:
  virtual ~AddressBook() = default;
  virtual LocalSpan local(const std::byte* address) const = 0;
  // How many bytes of the region, from `offset` on, one request can read. At least 1; `offset` lies
  // inside the region.
  virtual std::uint64_t remote_span(RegionKey region, std::uint64_t offset) const = 0;
};

// One READ of consecutive remote bytes.
struct ReadRequest {
  std::uint64_t remote_offset = 0;  // of the region
  std::uint32_t wire_bytes = 0;
  // The request brings bytes [payload_offset, + payload_bytes) of the op's runs, counted without
  // the gaps. If wire_bytes is larger, gaps between whole runs are read along.
  std::uint64_t payload_offset = 0;
  std::uint32_t payload_bytes = 0;
  // It lands in a bounce block, and scatter() copies it home. The scatter list is empty then.
  bool bounced = false;
  std::uint32_t sge_count = 0;
  std::array<ibv_sge, kMaxSge> sges;
};

// The place in an op's payload up to which requests were made. Ops of many short runs cost the CPU
// more than the wire, so the cursor neither divides nor looks up an address for each run.
class OpCursor {
 public:
  OpCursor() = default;
  OpCursor(const ReadOp& op, const ExpandLimits& limits);

  bool done() const { return position_ == total_; }
  std::uint64_t payload_left() const { return total_ - position_; }
  // Makes the next request. Not done(). `op` is the cursor's own op, and fits its region. Memory
  // that was registered at an earlier call still is.
  void next(const ReadOp& op, const ExpandLimits& limits, const AddressBook& book,
            ReadRequest& request) {
    if (stretch_ > 0 && op.run_bytes <= limits.request_bytes) {
      next_of_stretch(op, request);
    } else {
      look_up_next(op, limits, book, request);
    }
  }

 private:
  void next_of_stretch(const ReadOp& op, ReadRequest& request) {
    request.remote_offset = op.remote_offset + run_ * op.remote_stride;
    request.wire_bytes = request.payload_bytes = static_cast<std::uint32_t>(op.run_bytes);
    request.payload_offset = position_;
    request.bounced = false;
    request.sge_count = 1;
    request.sges[0] = {reinterpret_cast<std::uint64_t>(op.local + run_ * op.local_stride),
                       request.wire_bytes, stretch_lkey_};
    --stretch_;
    ++run_;
    position_ += op.run_bytes;
  }
  void look_up_next(const ReadOp& op, const ExpandLimits& limits, const AddressBook& book,
                    ReadRequest& request);
  void find_stretch(const ReadOp& op, std::uint64_t remote_bytes, const AddressBook& book);
  // Fills the scatter list with up to `wanted` payload bytes. Returns how many it holds.
  std::uint64_t gather(const ReadOp& op, const ExpandLimits& limits, const AddressBook& book,
                       std::uint64_t wanted, ReadRequest& request) const;
  // How many whole runs fit into `room` bytes with the gaps between them.
  std::uint64_t whole_runs(const ReadOp& op, std::uint64_t room) const;
  void advance(const ReadOp& op, std::uint64_t bytes);

  std::uint64_t total_ = 0;
  std::uint64_t position_ = 0;
  // position_ as a run, and a place in this run.
  std::uint64_t run_ = 0;
  std::uint64_t skip_ = 0;
  // So many of the next runs, from a whole one on, lie in one window and one piece of local memory:
  // each becomes a request of one entry.
  std::uint64_t stretch_ = 0;
  std::uint32_t stretch_lkey_ = 0;
  RunReads to_registered_ = RunReads::kInPlace;
  RunReads to_unregistered_ = RunReads::kInPlace;
};

// Copies the bytes of a bounced request to the op's destination.
void scatter(const ReadOp& op, const ReadRequest& request, const std::byte* block);

}  // namespace rekindle::transport::verbs
