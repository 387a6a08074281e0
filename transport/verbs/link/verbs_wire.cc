#include "transport/verbs/link/verbs_wire.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <tuple>
#include <utility>

#include "proto/verbs.pb.h"
#include "transport/verbs/staged/stage_wire.h"

namespace rekindle::transport::verbs {
namespace {

constexpr std::uint32_t kNumberLimit = 1 << 24;
constexpr std::size_t kMaxNameBytes = 64;
constexpr int kMaxWindows = 1 << 16;
constexpr std::size_t kMaxErrorBytes = 500;

// A peer's text goes into logs and onto terminals: it is cut to one line without control
// characters.
std::string one_line(std::string_view text) {
  std::string line(text.substr(0, kMaxErrorBytes));
  std::replace_if(
      line.begin(), line.end(),
      [](char c) { return static_cast<unsigned char>(c) < ' ' || c == 0x7f; }, ' ');
  return line;
}

Result<void> check_protocol(std::uint32_t protocol) {
  if (protocol == kVerbsProtocol) return {};
  return fail(ErrorCode::kInvalid, "the peer speaks verbs protocol {}, this side {}", protocol,
              kVerbsProtocol);
}

template <typename Message>
Result<Message> parse_message(std::string_view bytes) {
  Message message;
  if (bytes.size() > std::numeric_limits<int>::max() ||
      !message.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) {
    return fail(ErrorCode::kInvalid, "malformed verbs message of {} bytes", bytes.size());
  }
  TRY_VOID(check_protocol(message.protocol()));
  return message;
}

void to_proto(const RailInfo& rail, proto::VerbsRail& out) {
  out.set_index(rail.index);
  out.set_name(rail.name);
  out.set_link_layer(static_cast<std::uint32_t>(rail.address.link));
  out.set_gid(rail.address.gid.data(), rail.address.gid.size());
  out.set_lid(rail.address.lid);
  out.set_mtu_bytes(rail.mtu_bytes);
  out.set_bytes_per_second(rail.bytes_per_second);
}

Result<RailInfo> from_proto(const proto::VerbsRail& in) {
  RailInfo rail;
  const bool known = in.link_layer() == static_cast<std::uint32_t>(LinkLayer::kInfiniBand) ||
                     in.link_layer() == static_cast<std::uint32_t>(LinkLayer::kEthernet);
  const std::size_t gid_bytes = rail.address.gid.size();
  if (!known || in.gid().size() != gid_bytes || in.name().size() > kMaxNameBytes ||
      in.lid() > std::numeric_limits<std::uint16_t>::max() || in.index() >= kMaxRails) {
    return fail(ErrorCode::kInvalid, "the peer describes a rail that makes no sense");
  }
  rail.index = in.index();
  rail.name = one_line(in.name());
  rail.address.link = static_cast<LinkLayer>(in.link_layer());
  std::copy(in.gid().begin(), in.gid().end(), rail.address.gid.begin());
  rail.address.lid = static_cast<std::uint16_t>(in.lid());
  rail.mtu_bytes = in.mtu_bytes();
  rail.bytes_per_second = in.bytes_per_second();
  return rail;
}

template <typename Repeated>
Result<std::vector<RailInfo>> rails_from_proto(const Repeated& in) {
  std::vector<RailInfo> rails;
  for (const auto& rail : in) {
    if (rails.size() == kMaxRails) break;
    TRY(auto info, from_proto(rail));
    rails.push_back(std::move(info));
  }
  return rails;
}

template <typename Repeated>
Result<std::vector<QueuePairEnd>> ends_from_proto(const Repeated& in) {
  std::vector<QueuePairEnd> ends;
  if (static_cast<std::size_t>(in.size()) > kMaxQueuePairs) {
    return fail(ErrorCode::kInvalid, "the peer wants {} queue pairs on one link, at most {}",
                in.size(), kMaxQueuePairs);
  }
  for (const auto& pair : in) {
    if (pair.number() >= kNumberLimit || pair.packet_number() >= kNumberLimit) {
      return fail(ErrorCode::kInvalid, "the peer's queue pair number is out of range");
    }
    ends.push_back({pair.number(), pair.packet_number()});
  }
  return ends;
}

template <typename Repeated>
void ends_to_proto(const std::vector<QueuePairEnd>& ends, Repeated* out) {
  for (const auto& end : ends) {
    auto* pair = out->Add();
    pair->set_number(end.number);
    pair->set_packet_number(end.packet_number);
  }
}

std::uint8_t to_rd_atomic(std::uint32_t value) {
  return static_cast<std::uint8_t>(std::clamp<std::uint32_t>(value, 1, 255));
}

Result<StageOffer> from_proto(const proto::VerbsStage& in) {
  if (in.version() != kStageVersion) {
    return fail(ErrorCode::kInvalid, "the source stages by version {}, this side by {}",
                in.version(), kStageVersion);
  }
  StageOffer offer;
  offer.block_bytes = in.block_bytes();
  const bool sane = in.block_bytes() > 0 && in.block_bytes() <= kMaxStageBlockBytes &&
                    in.blocks_size() > 0 &&
                    static_cast<std::size_t>(in.blocks_size()) <= kMaxStageBlocks &&
                    in.regions_size() <= kMaxWindows;
  if (!sane) {
    return fail(ErrorCode::kInvalid, "the source offers {} staging blocks of {} bytes, {} regions",
                in.blocks_size(), in.block_bytes(), in.regions_size());
  }
  for (const auto& block : in.blocks()) {
    if (block.address() > std::numeric_limits<std::uint64_t>::max() - in.block_bytes()) {
      return fail(ErrorCode::kInvalid, "a staging block of the source ends beyond all addresses");
    }
    offer.blocks.push_back({block.address(), block.key()});
  }
  for (const auto& region : in.regions()) {
    offer.regions.push_back({{region.region(), region.generation()}, region.bytes()});
  }
  return offer;
}

void to_proto(const StageOffer& offer, proto::VerbsStage& out) {
  out.set_version(kStageVersion);
  out.set_block_bytes(offer.block_bytes);
  for (const auto& block : offer.blocks) {
    auto* item = out.add_blocks();
    item->set_address(block.address);
    item->set_key(block.key);
  }
  for (const auto& region : offer.regions) {
    auto* item = out.add_regions();
    item->set_region(region.key.region);
    item->set_generation(region.key.generation);
    item->set_bytes(region.bytes);
  }
}

Result<LinkResponse> from_proto(const proto::VerbsLinkResponse& in) {
  LinkResponse link;
  link.error = one_line(in.error());
  link.mtu_bytes = in.mtu_bytes();
  link.rd_atomic = to_rd_atomic(in.rd_atomic());
  TRY(link.queue_pairs, ends_from_proto(in.queue_pairs()));
  if (in.windows_size() > kMaxWindows) {
    return fail(ErrorCode::kInvalid, "the source lists {} windows, at most {}", in.windows_size(),
                kMaxWindows);
  }
  for (const auto& window : in.windows()) {
    link.windows.push_back({{window.region(), window.generation()},
                            window.offset(),
                            window.bytes(),
                            window.address(),
                            {window.keys().begin(), window.keys().end()}});
  }
  if (in.has_stage()) {
    TRY(link.stage, from_proto(in.stage()));
    if (link.queue_pairs.size() != 1 || !link.windows.empty()) {
      return fail(ErrorCode::kInvalid, "a staged link of {} queue pairs and {} windows",
                  link.queue_pairs.size(), link.windows.size());
    }
  }
  return link;
}

}  // namespace

RailInfo rail_info(const Rail& rail) {
  const Rail::State state = rail.state();
  return {rail.index(), rail.name(), state.address, state.mtu_bytes, state.bytes_per_second};
}

std::vector<RailInfo> rails_up(const Fabric& fabric) {
  std::vector<RailInfo> rails;
  for (const auto& rail : fabric.rails()) {
    if (rail->state().up) rails.push_back(rail_info(*rail));
  }
  return rails;
}

std::string Endpoint::to_bytes() const {
  proto::VerbsEndpoint out;
  out.set_protocol(kVerbsProtocol);
  for (const auto& rail : rails) to_proto(rail, *out.add_rails());
  return out.SerializeAsString();
}

Result<Endpoint> Endpoint::parse(std::string_view bytes) {
  TRY(const auto in, parse_message<proto::VerbsEndpoint>(bytes));
  Endpoint endpoint;
  TRY(endpoint.rails, rails_from_proto(in.rails()));
  return endpoint;
}

std::string ConnectRequest::to_bytes() const {
  proto::VerbsConnectRequest out;
  out.set_protocol(kVerbsProtocol);
  out.set_source_incarnation(source.to_bytes());
  for (const auto& link : links) {
    auto* item = out.add_links();
    to_proto(link.puller_rail, *item->mutable_puller_rail());
    item->set_source_rail(link.source_rail);
    item->set_mtu_bytes(link.mtu_bytes);
    item->set_rd_atomic(link.rd_atomic);
    ends_to_proto(link.queue_pairs, item->mutable_queue_pairs());
    item->set_stage_blocks(link.stage_blocks);
  }
  return out.SerializeAsString();
}

Result<ConnectRequest> ConnectRequest::parse(std::string_view bytes) {
  TRY(const auto in, parse_message<proto::VerbsConnectRequest>(bytes));
  ConnectRequest request;
  TRY(request.source, Incarnation::from_bytes(in.source_incarnation()));
  if (static_cast<std::size_t>(in.links_size()) > kMaxRails) {
    return fail(ErrorCode::kInvalid, "the puller asks for {} links, at most {}", in.links_size(),
                kMaxRails);
  }
  for (const auto& item : in.links()) {
    LinkRequest link;
    TRY(link.puller_rail, from_proto(item.puller_rail()));
    link.source_rail = item.source_rail();
    link.mtu_bytes = item.mtu_bytes();
    link.rd_atomic = to_rd_atomic(item.rd_atomic());
    TRY(link.queue_pairs, ends_from_proto(item.queue_pairs()));
    if (link.queue_pairs.empty()) {
      return fail(ErrorCode::kInvalid, "the puller asks for a link without queue pairs");
    }
    link.stage_blocks = item.stage_blocks();
    request.links.push_back(std::move(link));
  }
  return request;
}

std::string ConnectResponse::to_bytes() const {
  proto::VerbsConnectResponse out;
  out.set_protocol(kVerbsProtocol);
  out.set_source_incarnation(source.to_bytes());
  out.set_max_bytes_per_second(max_bytes_per_second);
  for (const auto& link : links) {
    auto* item = out.add_links();
    item->set_error(link.error);
    item->set_mtu_bytes(link.mtu_bytes);
    item->set_rd_atomic(link.rd_atomic);
    ends_to_proto(link.queue_pairs, item->mutable_queue_pairs());
    if (link.stage) to_proto(*link.stage, *item->mutable_stage());
    for (const auto& window : link.windows) {
      auto* entry = item->add_windows();
      entry->set_region(window.region.region);
      entry->set_generation(window.region.generation);
      entry->set_offset(window.offset);
      entry->set_bytes(window.bytes);
      entry->set_address(window.address);
      entry->mutable_keys()->Add(window.keys.begin(), window.keys.end());
    }
  }
  for (const auto& key : stale) {
    auto* item = out.add_stale();
    item->set_region(key.region);
    item->set_generation(key.generation);
  }
  for (const auto& rail : rails) to_proto(rail, *out.add_rails());
  return out.SerializeAsString();
}

Result<ConnectResponse> ConnectResponse::parse(std::string_view bytes) {
  TRY(const auto in, parse_message<proto::VerbsConnectResponse>(bytes));
  ConnectResponse response;
  TRY(response.source, Incarnation::from_bytes(in.source_incarnation()));
  response.max_bytes_per_second = in.max_bytes_per_second();
  if (static_cast<std::size_t>(in.links_size()) > kMaxRails) {
    return fail(ErrorCode::kInvalid, "the source answers for {} links", in.links_size());
  }
  for (const auto& item : in.links()) {
    TRY(auto link, from_proto(item));
    response.links.push_back(std::move(link));
  }
  for (const auto& key : in.stale()) response.stale.push_back({key.region(), key.generation()});
  TRY(response.rails, rails_from_proto(in.rails()));
  return response;
}

namespace {

bool before(const RemoteWindow& a, const RemoteWindow& b) {
  return std::tie(a.region, a.offset) < std::tie(b.region, b.offset);
}

}  // namespace

Result<RemoteWindows> RemoteWindows::create(std::vector<RemoteWindow> windows,
                                            std::vector<RegionKey> stale, std::size_t queue_pairs) {
  std::sort(windows.begin(), windows.end(), before);
  const RemoteWindow* previous = nullptr;
  for (const auto& window : windows) {
    const bool follows = previous != nullptr && previous->region == window.region;
    const std::uint64_t expected = follows ? previous->offset + previous->bytes : 0;
    constexpr std::uint64_t kMax = std::numeric_limits<std::uint64_t>::max();
    if (window.offset != expected || window.bytes == 0 || window.bytes > kMax - window.offset ||
        window.bytes > kMax - window.address) {
      return fail(ErrorCode::kInvalid, "windows of region {}.{} do not fit together",
                  window.region.region, window.region.generation);
    }
    if (window.keys.size() != 1 && window.keys.size() != queue_pairs) {
      return fail(ErrorCode::kInvalid, "{} keys of region {}.{} for {} queue pairs",
                  window.keys.size(), window.region.region, window.region.generation, queue_pairs);
    }
    previous = &window;
  }
  RemoteWindows result;
  result.windows_ = std::move(windows);
  result.stale_ = std::move(stale);
  std::sort(result.stale_.begin(), result.stale_.end());
  return result;
}

RemoteWindows::Found RemoteWindows::region(RegionKey key) const {
  const auto end = std::upper_bound(
      windows_.begin(), windows_.end(), key,
      [](RegionKey wanted, const RemoteWindow& window) { return wanted < window.region; });
  if (end != windows_.begin() && std::prev(end)->region == key) {
    return {OpStatus::kOk, std::prev(end)->offset + std::prev(end)->bytes};
  }
  const bool gone = std::binary_search(stale_.begin(), stale_.end(), key);
  return {gone ? OpStatus::kStale : OpStatus::kDenied, 0};
}

const RemoteWindow& RemoteWindows::at(RegionKey region, std::uint64_t offset) const {
  const auto after = std::upper_bound(windows_.begin(), windows_.end(), std::pair(region, offset),
                                      [](const auto& wanted, const RemoteWindow& window) {
                                        return wanted < std::pair(window.region, window.offset);
                                      });
  return *std::prev(after);
}

}  // namespace rekindle::transport::verbs
