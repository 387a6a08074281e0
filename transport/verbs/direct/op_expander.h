#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "transport/read_op.h"
#include "transport/verbs/device/verbs_api.h"

// Turns a strided ReadOp into work requests, one at a time. Pure, without allocation.
namespace rekindle::transport::verbs {

inline constexpr std::uint32_t kMaxSge = 16;

struct ExpandLimits {
  // The most bytes of a work request, and of one that lands in a bounce block.
  std::uint32_t request_bytes = 1 << 20;
  std::uint32_t bounce_bytes = 256 << 10;
  std::uint32_t max_sge = kMaxSge;  // at most kMaxSge
  // The cost of a work request, in bytes on the wire. Smaller gaps are read along.
  std::uint32_t request_cost_bytes = 4096;
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

class OpCursor {
 public:
  OpCursor() = default;
  explicit OpCursor(const ReadOp& op) : total_(op.total_bytes()) {}

  bool done() const { return position_ == total_; }
  std::uint64_t payload_left() const { return total_ - position_; }
  // Makes the next request. Not done(). `op` is the cursor's own op, and fits its region.
  void next(const ReadOp& op, const ExpandLimits& limits, const AddressBook& book,
            ReadRequest& request);

 private:
  std::uint64_t total_ = 0;
  std::uint64_t position_ = 0;  // payload bytes that earlier requests bring
};

// Copies the bytes of a bounced request to the op's destination.
void scatter(const ReadOp& op, const ReadRequest& request, const std::byte* block);

}  // namespace rekindle::transport::verbs
