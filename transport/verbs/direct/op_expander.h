#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "transport/read_op.h"
#include "transport/verbs/device/verbs_api.h"

// Turns a strided ReadOp into work requests, one at a time: pure, no allocation.
namespace rekindle::transport::verbs {

inline constexpr std::uint32_t kMaxSge = 16;

struct ExpandLimits {
  std::uint32_t request_bytes = 1 << 20;   // of one work request at most
  std::uint32_t bounce_bytes = 256 << 10;  // of one that lands in a bounce block
  std::uint32_t max_sge = kMaxSge;         // at most kMaxSge
  // What a work request costs, as bytes on the wire: gaps up to this are read along.
  std::uint32_t request_cost_bytes = 4096;
};

// Bytes from some address on that share a key; 0 bytes: not registered.
struct LocalSpan {
  std::uint32_t lkey = 0;
  std::uint64_t bytes = 0;
};

// Which memory is registered how, on the rail in question.
class AddressBook {
 public:
  virtual ~AddressBook() = default;
  virtual LocalSpan local(const std::byte* address) const = 0;
  // Bytes of the region from `offset` (inside it) that one request can read: at least 1.
  virtual std::uint64_t remote_span(RegionKey region, std::uint64_t offset) const = 0;
};

// One READ of consecutive remote bytes.
struct ReadRequest {
  std::uint64_t remote_offset = 0;  // of the region
  std::uint32_t wire_bytes = 0;
  // The part of the op that it brings: bytes [payload_offset, + payload_bytes) of its runs, counted
  // without the gaps. More wire than payload: gaps between whole runs are read along.
  std::uint64_t payload_offset = 0;
  std::uint32_t payload_bytes = 0;
  bool bounced = false;  // lands in a bounce block; scatter() brings it home. No scatter list then.
  std::uint32_t sge_count = 0;
  std::array<ibv_sge, kMaxSge> sges;
};

class OpCursor {
 public:
  OpCursor() = default;
  explicit OpCursor(const ReadOp& op) : total_(op.total_bytes()) {}

  bool done() const { return position_ == total_; }
  std::uint64_t payload_left() const { return total_ - position_; }
  // The next request; not done(). `op` is the one that the cursor was made of, and fits its region.
  void next(const ReadOp& op, const ExpandLimits& limits, const AddressBook& book,
            ReadRequest& request);

 private:
  std::uint64_t total_ = 0;
  std::uint64_t position_ = 0;  // payload bytes that earlier requests bring
};

// Copies what a bounced request has brought to where the op wants it.
void scatter(const ReadOp& op, const ReadRequest& request, const std::byte* block);

}  // namespace rekindle::transport::verbs
