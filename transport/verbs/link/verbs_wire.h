#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "src/base/ids.h"
#include "src/base/result.h"
#include "transport/read_op.h"
#include "transport/verbs/device/fabric.h"
#include "transport/verbs/link/verbs_connection.h"

// The messages of a handshake (proto/verbs.proto). They are checked as they come in.
namespace rekindle::transport::verbs {

// A part of a region, as the source's NIC knows it.
struct RemoteWindow {
  RegionKey region;
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
  std::uint64_t address = 0;
  // One for each queue pair, or one for all of them.
  std::vector<std::uint32_t> keys;

  std::uint32_t key(std::size_t queue_pair) const {
    return keys.size() == 1 ? keys.front() : keys[queue_pair];
  }
};

// The regions that a granted handshake lets one path read. Immutable.
class RemoteWindows {
 public:
  // kInvalid: a region with holes or overlaps, or not as many keys as queue pairs.
  static Result<RemoteWindows> create(std::vector<RemoteWindow> windows,
                                      std::vector<RegionKey> stale, std::size_t queue_pairs);

  // The size of a region. kStale: it is not served any more. kDenied: the session may not read it.
  struct Found {
    OpStatus status = OpStatus::kOk;
    std::uint64_t bytes = 0;
  };
  Found region(RegionKey key) const;
  const RemoteWindow& at(RegionKey region, std::uint64_t offset) const;  // inside the region

 private:
  std::vector<RemoteWindow> windows_;  // by region and offset
  std::vector<RegionKey> stale_;       // sorted
};

inline constexpr std::uint32_t kVerbsProtocol = 1;
inline constexpr std::size_t kMaxRails = 64;
inline constexpr std::size_t kMaxQueuePairs = 16;  // of one link

struct RailInfo {
  std::uint32_t index = 0;  // at its own host
  std::string name;
  RailAddress address;
  std::uint32_t mtu_bytes = 0;
  std::uint64_t bytes_per_second = 0;  // 0: unknown
};
RailInfo rail_info(const Rail& rail);
std::vector<RailInfo> rails_up(const Fabric& fabric);

// A source's offer.
struct Endpoint {
  std::vector<RailInfo> rails;
  std::string to_bytes() const;
  static Result<Endpoint> parse(std::string_view bytes);
};

struct LinkRequest {
  RailInfo puller_rail;
  std::uint32_t source_rail = 0;
  std::uint32_t mtu_bytes = 0;
  std::uint8_t rd_atomic = 1;
  std::vector<QueuePairEnd> queue_pairs;
  std::uint32_t stage_blocks = 0;  // of a staged link that the puller could have open
};
struct ConnectRequest {
  Incarnation source;
  // None: the puller only asks for the source's rails.
  std::vector<LinkRequest> links;
  std::string to_bytes() const;
  static Result<ConnectRequest> parse(std::string_view bytes);
};

// How a staged link is read (stage_wire.h).
struct StageOffer {
  struct Block {
    std::uint64_t address = 0;
    std::uint32_t key = 0;
  };
  struct Region {
    RegionKey key;
    std::uint64_t bytes = 0;
  };
  std::uint32_t block_bytes = 0;
  std::vector<Block> blocks;
  std::vector<Region> regions;
};
struct LinkResponse {
  std::string error;  // "": it is ready
  std::uint32_t mtu_bytes = 0;
  std::uint8_t rd_atomic = 1;
  std::vector<QueuePairEnd> queue_pairs;
  std::vector<RemoteWindow> windows;
  std::optional<StageOffer> stage;
};
struct ConnectResponse {
  Incarnation source;
  std::uint64_t max_bytes_per_second = 0;
  std::vector<LinkResponse> links;
  std::vector<RegionKey> stale;
  // The rails that are up now. They may differ from those of the offer.
  std::vector<RailInfo> rails;
  std::string to_bytes() const;
  static Result<ConnectResponse> parse(std::string_view bytes);
};

}  // namespace rekindle::transport::verbs
