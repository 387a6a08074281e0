#include "recovery/rpc/peer_budgets.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include <boost/asio/ip/address_v6.hpp>

#include "recovery/rpc/address.h"
#include "recovery/rpc/method_rules.h"
#include "src/base/units.h"

namespace rekindle::rpc {

namespace {

Duration seconds_of(double seconds) {
  return std::chrono::duration_cast<Duration>(std::chrono::duration<double>(seconds));
}

// Addresses of one prefix that belong to different hosts: of this host, of the neighbours on a
// link, and of IPv4 hosts behind a translator (RFC 6052).
bool stands_alone(const boost::asio::ip::address_v6& address) {
  constexpr std::array<std::uint8_t, 12> kTranslated{0, 0x64, 0xff, 0x9b};
  const auto bytes = address.to_bytes();
  return address.is_loopback() || address.is_link_local() ||
         std::equal(kTranslated.begin(), kTranslated.end(), bytes.begin());
}

}  // namespace

std::string host_of_address(const std::string& address) {
  const auto parsed = HostPort::parse(address);
  if (!parsed) return address;
  boost::system::error_code not_v6;
  const auto v6 = boost::asio::ip::make_address_v6(parsed->host, not_v6);
  if (not_v6 || stands_alone(v6)) return parsed->host;
  auto bytes = v6.to_bytes();
  std::fill(bytes.begin() + 8, bytes.end(), std::uint8_t{0});
  return boost::asio::ip::address_v6(bytes).to_string() + "/64";
}

bool has_own_name(const Peer& peer) {
  if (peer.proof != Proof::kCertificate || peer.principals.empty()) return false;
  const auto certified = certified_role(peer.principals);
  return !certified || !certified->name.empty();
}

std::string budget_key(const Peer& peer) {
  if (peer.local_user) return {};
  if (has_own_name(peer)) return peer.principals.front();
  return host_of_address(peer.address);
}

void TokenBucket::gain(TimePoint now) {
  if (now > last_) {
    const double passed = std::chrono::duration<double>(now - last_).count();
    left_ = std::min(burst_, left_ + passed * per_second_);
  }
  last_ = std::max(last_, now);
}

Duration TokenBucket::take(double units, TimePoint now) {
  gain(now);
  units = std::min(units, burst_);
  if (units <= left_) {
    left_ -= units;
    return Duration::zero();
  }
  return std::max(seconds_of((units - left_) / per_second_), Duration(1));
}

bool TokenBucket::full(TimePoint now) const {
  TokenBucket later = *this;
  later.gain(now);
  return later.left_ >= burst_;
}

Result<void> RateBudgets::take(const std::string& key, const std::string& what, double units,
                               double per_second, double burst, TimePoint now) {
  if (key.empty()) return {};
  if (buckets_.size() >= forget_at_) forget_full(now);
  TokenBucket& bucket = buckets_.try_emplace({key, what}, per_second, burst).first->second;
  const Duration wait = bucket.take(units, now);
  if (wait == Duration::zero()) return {};
  return fail(ErrorCode::kExhausted,
              "{} from {}: more than {:.0f} at once and {:.0f} a second; call again in {} ms", what,
              key, burst, per_second, std::max<std::int64_t>(milliseconds(wait), 1));
}

void RateBudgets::forget_full(TimePoint now) {
  std::erase_if(buckets_, [&](auto& entry) { return entry.second.full(now); });
  forget_at_ = std::max<std::size_t>(1024, 2 * buckets_.size());
}

Result<LargeFrames::Share> LargeFrames::take(const std::string& key, std::uint64_t bytes) {
  if (key.empty()) return Share();
  const auto found = state_->of_peer.find(key);
  const std::uint64_t has = found == state_->of_peer.end() ? 0 : found->second;
  if (has + bytes > kMaxBytesPerPeer) {
    return fail(ErrorCode::kExhausted,
                "{} has calls of {} under way, {} more are over the limit of {}; wait for their "
                "answers",
                key, format_bytes(has), format_bytes(bytes), format_bytes(kMaxBytesPerPeer));
  }
  if (state_->bytes + bytes > kMaxBytes) {
    return fail(ErrorCode::kExhausted, "this server is serving large calls of {}; try again later",
                format_bytes(state_->bytes));
  }
  state_->bytes += bytes;
  state_->of_peer[key] += bytes;
  return Share(state_.get(), [state = state_, key, bytes](const void*) {
    state->bytes -= bytes;
    const auto entry = state->of_peer.find(key);
    entry->second -= bytes;
    if (entry->second == 0) state->of_peer.erase(entry);
  });
}

}  // namespace rekindle::rpc
