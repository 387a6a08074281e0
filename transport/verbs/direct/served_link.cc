#include "transport/verbs/direct/served_link.h"

#include <algorithm>
#include <chrono>
#include <utility>

namespace rekindle::transport::verbs {
namespace {

constexpr std::uint32_t kServedSendDepth = 64;
constexpr std::chrono::milliseconds kBindDeadline{1000};

}  // namespace

Result<std::unique_ptr<ServedLink>> ServedLink::create(Rail& rail, const LinkRequest& request,
                                                       std::size_t max_queue_pairs,
                                                       ServedRegions regions) {
  ConnectionOptions options;
  options.queue_pairs = std::min(request.queue_pairs.size(), max_queue_pairs);
  options.send_depth = kServedSendDepth;
  TRY(auto connection, Connection::create(rail, options));
  RemoteEnd remote;
  remote.address = request.puller_rail.address;
  remote.mtu_bytes = std::min(request.mtu_bytes, connection->mtu_bytes());
  remote.rd_atomic = std::min(request.rd_atomic, rail.device().limits().max_rd_atomic);
  remote.queue_pairs = request.queue_pairs;
  remote.queue_pairs.resize(connection->queue_pair_count());
  TRY_VOID(connection->connect(remote, ConnectionRole::kServes));

  std::unique_ptr<ServedLink> link(
      new ServedLink(std::move(connection), std::move(regions), request.puller_rail.index));
  link->response_.mtu_bytes = remote.mtu_bytes;
  link->response_.rd_atomic = remote.rd_atomic;
  link->response_.queue_pairs = link->connection_->ends();
  TRY_VOID(link->open_regions());
  return link;
}

Result<void> ServedLink::open_regions() {
  const Device& device = connection_->rail().device();
  for (const auto& [key, memory] : regions_) {
    for (const Piece& piece : memory->pieces(device)) {
      RemoteWindow window{key, piece.offset, piece.bytes, piece.address, {}};
      TRY_VOID(windows_.bind(piece, window, std::chrono::steady_clock::now() + kBindDeadline));
      response_.windows.push_back(std::move(window));
    }
  }
  return windows_.settle(std::chrono::steady_clock::now() + kBindDeadline);
}

bool ServedLink::over(const ServedRegions& regions) const {
  return connection_->rail_moved() ||
         std::any_of(regions_.begin(), regions_.end(),
                     [&](const auto& region) { return !regions.contains(region.first); });
}

void ServedLink::stop(TimePoint deadline) {
  (void)windows_.settle(deadline);
  connection_->stop();
}

void ServedLink::release(TimePoint deadline) {
  (void)windows_.settle(deadline);
  windows_.deallocate();
  connection_->destroy_queue_pairs();
  regions_.clear();
}

}  // namespace rekindle::transport::verbs
