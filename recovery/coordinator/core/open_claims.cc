#include "recovery/coordinator/core/open_claims.h"

#include <algorithm>

namespace rekindle::coordinator {

namespace {
constexpr Duration kCollectEvery = std::chrono::minutes(1);
}  // namespace

bool OpenClaims::is_open(const ModelVersion& id) const {
  const auto version = fleet_.table.next_version(id);
  return version && !version->ready && !version->retiring;
}

bool OpenClaims::is_held(const ModelVersion& id) const {
  return std::ranges::any_of(fleet_.members.all(),
                             [&](const auto& entry) { return entry.second.holdings.holds(id); });
}

Result<void> OpenClaims::check(const std::string& claimant, const ModelVersion& id) {
  const auto found = of_claimant_.find(claimant);
  if (claimant.empty() || found == of_claimant_.end()) return {};
  std::set<ModelVersion>& claims = found->second;
  const std::size_t most = fleet_.limits.max_open_claims;
  if (claims.size() < most || claims.contains(id)) return {};
  std::erase_if(claims, [this](const ModelVersion& claim) { return !is_open(claim); });
  if (claims.size() < most) return {};
  return fail(ErrorCode::kExhausted,
              "publish {}: {} has claimed {} versions of which there is no complete copy, such as "
              "{}; publish or retire them, or raise --max-open-claims of the coordinator",
              id.to_string(), claimant, claims.size(), claims.begin()->to_string());
}

void OpenClaims::add(const std::string& claimant, const ModelVersion& id) {
  if (!claimant.empty() && is_open(id)) of_claimant_[claimant].insert(id);
}

void OpenClaims::collect(TimePoint now) {
  if (now < next_collection_) return;
  next_collection_ = now + kCollectEvery;
  std::map<ModelVersion, TimePoint> unheld;
  for (const ModelVersion& id : fleet_.catalog.live()) {
    if (fleet_.catalog.find(id)->ready || !is_open(id) || is_held(id)) continue;
    const auto before = unheld_.find(id);
    const TimePoint since = before == unheld_.end() ? now : before->second;
    if (now - since >= fleet_.timing.forget_open_claim) {
      fleet_.table.erase_version(id);
    } else {
      unheld[id] = since;
    }
  }
  unheld_ = std::move(unheld);
  for (auto& [claimant, claims] : of_claimant_) {
    std::erase_if(claims, [this](const ModelVersion& claim) { return !is_open(claim); });
  }
  std::erase_if(of_claimant_, [](const auto& entry) { return entry.second.empty(); });
}

}  // namespace rekindle::coordinator
