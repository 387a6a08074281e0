#include "transport/verbs/link/link_revocation.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>
#include <utility>
#include <vector>

namespace rekindle::transport::verbs {
namespace {

constexpr std::chrono::milliseconds kInvalidateDeadline{200};

}  // namespace

void SourceLink::revoke() {
  SourceLink* const self = this;
  revoke_all({&self, 1});
}

// Memory windows go first: reads fail from then on, even while the queue pairs take their time.
// Windows that could not be invalidated are deallocated before their queue pair is destroyed, as
// soft-RoCE needs a minute for that otherwise. Destroying the queue pair ends every access.
void SourceLink::revoke_all(std::span<SourceLink* const> links) {
  std::vector<SourceLink*> open;
  for (auto* link : links) {
    if (link->begin_revoke()) open.push_back(link);
  }
  const TimePoint invalidated_by = std::chrono::steady_clock::now() + kInvalidateDeadline;
  for (auto* link : open) link->post_invalidations(invalidated_by);
  for (auto* link : open) link->stop(invalidated_by);
  const TimePoint flushed_by = std::chrono::steady_clock::now() + kInvalidateDeadline;
  for (auto* link : open) link->release(flushed_by);
}

namespace {

constexpr auto kCompletionNap = std::chrono::microseconds(50);

}  // namespace

Result<void> MemoryWindows::bind(const Piece& piece, RemoteWindow& out, TimePoint deadline) {
  const Rail& rail = connection_.rail();
  for (std::size_t i = 0; i < connection_.queue_pair_count(); ++i) {
    auto window = MemoryWindow::allocate(rail.device());
    if (!window) {
      return fail(window.error().code(), "{}: no memory window left for region {}.{}: {}",
                  rail.name(), out.region.region, out.region.generation, window.error().message());
    }
    out.keys.push_back(window->key());
    const ibv_send_wr request = window->binding(piece.mr, piece.address, piece.bytes);
    windows_.push_back({std::move(*window), i});
    TRY_VOID(post(i, request, deadline));
  }
  return {};
}

void MemoryWindows::post_invalidations(TimePoint deadline) {
  for (const auto& [window, queue_pair] : windows_) {
    // It fails when the queue pair is down already.
    if (!post(queue_pair, window.invalidation(), deadline)) return;
  }
}

Result<void> MemoryWindows::post(std::size_t queue_pair, ibv_send_wr request, TimePoint deadline) {
  if (posted_[queue_pair] >= connection_.send_depth()) TRY_VOID(settle(deadline));
  ibv_send_wr* bad = nullptr;
  request.send_flags = IBV_SEND_SIGNALED;
  request.wr_id = queue_pair;
  const int error = connection_.api().post_send(connection_.queue_pair(queue_pair), &request, &bad);
  if (error != 0) {
    return fail(ErrorCode::kUnavailable, "{}: post to a queue pair: {}", connection_.rail().name(),
                std::strerror(error));
  }
  ++posted_[queue_pair];
  return {};
}

Result<void> MemoryWindows::settle(TimePoint deadline) {
  std::array<ibv_wc, 16> completions;
  ibv_wc_status worst = IBV_WC_SUCCESS;
  while (std::any_of(posted_.begin(), posted_.end(), [](std::size_t count) { return count > 0; })) {
    const int count = connection_.api().poll_cq(
        connection_.cq(), static_cast<int>(completions.size()), completions.data());
    for (int i = 0; i < count; ++i) {
      const ibv_wc& wc = completions[static_cast<std::size_t>(i)];
      if (wc.wr_id < posted_.size()) --posted_[wc.wr_id];
      if (worst == IBV_WC_SUCCESS) worst = wc.status;
      // A failed request does not tell its opcode.
      if (wc.status != IBV_WC_SUCCESS) continue;
      WindowCounts& counts = connection_.rail().device().windows();
      if (wc.opcode == IBV_WC_BIND_MW) ++counts.bound;
      if (wc.opcode == IBV_WC_LOCAL_INV) ++counts.invalidated;
    }
    if (count > 0) continue;
    if (count < 0 || std::chrono::steady_clock::now() >= deadline) {
      return fail(ErrorCode::kTimeout, "{}: the NIC does not complete its requests",
                  connection_.rail().name());
    }
    std::this_thread::sleep_for(kCompletionNap);
  }
  if (worst == IBV_WC_SUCCESS) return {};
  return fail(ErrorCode::kUnavailable, "{}: bind a memory window: {}", connection_.rail().name(),
              ibv_wc_status_str(worst));
}

}  // namespace rekindle::transport::verbs
