#include "transport/verbs/link/remote_windows.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <tuple>
#include <utility>

namespace rekindle::transport::verbs {
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
