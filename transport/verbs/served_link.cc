#include "transport/verbs/served_link.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>
#include <utility>

#include "src/base/log.h"

namespace rekindle::transport::verbs {
namespace {

constexpr std::uint32_t kSendDepth = 64;
constexpr std::chrono::milliseconds kBindDeadline{1000};
constexpr auto kNap = std::chrono::microseconds(50);

}  // namespace

Result<std::unique_ptr<ServedLink>> ServedLink::create(Rail& rail, const LinkRequest& request,
                                                       std::size_t max_queue_pairs,
                                                       ServedRegions regions) {
  ConnectionOptions options;
  options.queue_pairs = std::min(request.queue_pairs.size(), max_queue_pairs);
  options.send_depth = kSendDepth;
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
  link->posted_.resize(link->connection_->queue_pair_count());
  link->response_.mtu_bytes = remote.mtu_bytes;
  link->response_.rd_atomic = remote.rd_atomic;
  link->response_.queue_pairs = link->connection_->ends();
  TRY_VOID(link->open_windows());
  return link;
}

Result<void> ServedLink::open_windows() {
  const Device& device = connection_->rail().device();
  for (const auto& [key, memory] : regions_) {
    for (const Piece& piece : memory->pieces(device)) {
      RemoteWindow window{key, piece.offset, piece.bytes, piece.address, {}};
      if (device.limits().memory_windows_2b) {
        TRY_VOID(open_window(key, piece, window));
      } else {
        window.keys.push_back(piece.rkey);
      }
      response_.windows.push_back(std::move(window));
    }
  }
  return collect(std::chrono::steady_clock::now() + kBindDeadline);
}

// One per queue pair: a window of type 2B belongs to the queue pair that bound it.
Result<void> ServedLink::open_window(RegionKey key, const Piece& piece, RemoteWindow& out) {
  const TimePoint deadline = std::chrono::steady_clock::now() + kBindDeadline;
  Api& api = connection_->api();
  for (std::size_t i = 0; i < connection_->queue_pair_count(); ++i) {
    Window window;
    window.handle =
        MwHandle(api.alloc_mw(connection_->rail().device().pd(), IBV_MW_TYPE_2), {&api});
    if (!window.handle) {
      return fail(ErrorCode::kExhausted, "{}: no memory window left for region {}.{}: {}",
                  connection_->rail().name(), key.region, key.generation, std::strerror(errno));
    }
    window.queue_pair = i;
    window.key = ibv_inc_rkey(window.handle->rkey);
    ibv_send_wr request{};
    request.opcode = IBV_WR_BIND_MW;
    request.send_flags = IBV_SEND_SIGNALED;
    request.bind_mw.mw = window.handle.get();
    request.bind_mw.rkey = window.key;
    request.bind_mw.bind_info = {piece.mr, piece.address, piece.bytes, IBV_ACCESS_REMOTE_READ};
    out.keys.push_back(window.key);
    windows_.push_back(std::move(window));
    TRY_VOID(post(i, request, deadline));
  }
  return {};
}

Result<void> ServedLink::post(std::size_t queue_pair, ibv_send_wr& request, TimePoint deadline) {
  if (posted_[queue_pair] >= connection_->send_depth()) TRY_VOID(collect(deadline));
  ibv_send_wr* bad = nullptr;
  request.wr_id = queue_pair;
  const int error =
      connection_->api().post_send(connection_->queue_pair(queue_pair), &request, &bad);
  if (error != 0) {
    return fail(ErrorCode::kUnavailable, "{}: post to a queue pair: {}", connection_->rail().name(),
                std::strerror(error));
  }
  ++posted_[queue_pair];
  return {};
}

Result<void> ServedLink::collect(TimePoint deadline) {
  std::array<ibv_wc, 16> completions;
  ibv_wc_status worst = IBV_WC_SUCCESS;
  while (std::any_of(posted_.begin(), posted_.end(), [](std::size_t count) { return count > 0; })) {
    const int count = connection_->api().poll_cq(
        connection_->cq(), static_cast<int>(completions.size()), completions.data());
    for (int i = 0; i < count; ++i) {
      const ibv_wc& wc = completions[static_cast<std::size_t>(i)];
      if (wc.wr_id < posted_.size()) --posted_[wc.wr_id];
      if (worst == IBV_WC_SUCCESS) worst = wc.status;
    }
    if (count > 0) continue;
    if (count < 0 || std::chrono::steady_clock::now() >= deadline) {
      return fail(ErrorCode::kTimeout, "{}: the NIC does not complete its requests",
                  connection_->rail().name());
    }
    std::this_thread::sleep_for(kNap);
  }
  if (worst == IBV_WC_SUCCESS) return {};
  return fail(ErrorCode::kUnavailable, "{}: bind a memory window: {}", connection_->rail().name(),
              ibv_wc_status_str(worst));
}

bool ServedLink::over(const ServedRegions& regions) const {
  return connection_->rail_moved() ||
         std::any_of(regions_.begin(), regions_.end(),
                     [&](const auto& region) { return !regions.contains(region.first); });
}

void ServedLink::post_invalidations(TimePoint deadline) {
  for (const auto& window : windows_) {
    ibv_send_wr request{};
    request.opcode = IBV_WR_LOCAL_INV;
    request.send_flags = IBV_SEND_SIGNALED;
    request.invalidate_rkey = window.key;
    if (!post(window.queue_pair, request, deadline)) return;  // the queue pair is down already
  }
}

void ServedLink::stop(TimePoint deadline) {
  (void)collect(deadline);
  connection_->stop();
}

void ServedLink::release(TimePoint deadline) {
  (void)collect(deadline);
  windows_.clear();
  connection_->destroy_queue_pairs();
  regions_.clear();
}

}  // namespace rekindle::transport::verbs
