#include "recovery/agent/link_drill.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include <fmt/ranges.h>

#include "src/base/clock.h"
#include "src/base/log.h"

namespace rekindle::agent {
namespace {

constexpr std::uint32_t kLongestCutMs = 60'000;

std::uint32_t to_ms(Duration duration) {
  constexpr std::int64_t kMost = std::numeric_limits<std::uint32_t>::max();
  const auto ms = std::chrono::ceil<std::chrono::milliseconds>(duration).count();
  return static_cast<std::uint32_t>(std::clamp<std::int64_t>(ms, 0, kMost));
}

proto::RouteList list_routes(const transport::LinkCuts& links) {
  proto::RouteList list;
  list.set_left_ms(to_ms(links.left(steady_now())));
  for (const auto& route : links.routes()) {
    auto& entry = *list.add_routes();
    entry.set_version(route.reader);
    entry.set_peer(route.peer);
    entry.set_description(route.description);
    entry.set_silenced(route.silenced);
    if (route.noticed_after) entry.set_noticed_after_ms(to_ms(*route.noticed_after));
    entry.set_ended(route.ended);
    entry.set_bytes(route.bytes);
  }
  return list;
}

Result<void> check_rail(const Rdma* rdma, const std::string& rail) {
  if (rail.empty()) return {};
  std::vector<std::string> names;
  if (rdma != nullptr) {
    for (const auto& view : rdma->rails()) names.push_back(view.name);
  }
  if (std::ranges::find(names, rail) != names.end()) return {};
  if (names.empty()) return fail(ErrorCode::kNotFound, "no rail '{}': the host uses none", rail);
  return fail(ErrorCode::kNotFound, "no rail '{}': the host has {}", rail, fmt::join(names, ", "));
}

}  // namespace

Result<proto::DrillResponse> answer_link_drill(transport::LinkCuts& links, const Rdma* rdma,
                                               const rpc::Peer& peer,
                                               const proto::DrillRequest& request) {
  proto::DrillResponse response;
  if (request.has_list_routes()) {
    *response.mutable_routes() = list_routes(links);
    return response;
  }
  const auto& cut = request.cut_links();
  if (cut.milliseconds() == 0 || cut.milliseconds() > kLongestCutMs) {
    return fail(ErrorCode::kInvalid, "a cut lasts 1 to {} ms", kLongestCutMs);
  }
  TRY_VOID(check_rail(rdma, cut.rail()));
  if (request.dry_run()) return response;
  log::warn("drill", "asked_by", peer.node_id, "address", peer.address, "does",
            request.ShortDebugString());
  const TimePoint now = steady_now();
  links.cut({cut.peer(), cut.rail(), cut.peer_rail()}, now,
            now + std::chrono::milliseconds(cut.milliseconds()));
  return response;
}

}  // namespace rekindle::agent
