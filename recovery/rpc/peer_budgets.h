#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "recovery/rpc/rpc.h"
#include "src/base/clock.h"
#include "src/base/result.h"

namespace rekindle::rpc {

// Whether the peer has proven a name that no other process has. A cluster secret, and a certificate
// that names only a role, belong to many.
bool has_own_name(const Peer& peer);
// Whom the use of a server is charged to: the first name of the certificate of the peer, if it is
// its own, else its host_of_address(). "": a process on the unix socket, which has no budget.
std::string budget_key(const Peer& peer);
// The host of an address as Peer has it. Of IPv6 the network, as "2001:db8:1:2::/64": whoever has
// one address of it usually has all of them.
std::string host_of_address(const std::string& address);

// Gains `per_second` units a second, up to `burst`, and starts with `burst`.
class TokenBucket {
 public:
  TokenBucket(double per_second, double burst)
      : per_second_(per_second), burst_(burst), left_(burst) {}

  // 0: it has taken them. Else how long to wait before it has as many; it takes nothing. More than
  // `burst` counts as `burst`.
  Duration take(double units, TimePoint now);
  // It has all of its units: it may be forgotten.
  bool full(TimePoint now) const;

 private:
  void gain(TimePoint now);

  double per_second_;
  double burst_;
  double left_;
  TimePoint last_{};
};

// Token buckets by peer and purpose. Forgets those that are full. One thread.
class RateBudgets {
 public:
  // kExhausted: the message says which limit and when to call again. `what`: "COORDINATOR_STATUS".
  Result<void> take(const std::string& key, const std::string& what, double units,
                    double per_second, double burst, TimePoint now);
  std::size_t size() const { return buckets_.size(); }

 private:
  void forget_full(TimePoint now);

  std::map<std::pair<std::string, std::string>, TokenBucket> buckets_;
  // Look for full ones at this size.
  std::size_t forget_at_ = 1024;
};

// The bytes of large frames that are being received or served, for each peer and together.
class LargeFrames {
 public:
  static constexpr std::uint64_t kMaxBytesPerPeer = 64u << 20;
  static constexpr std::uint64_t kMaxBytes = 1u << 30;

  // Gives the bytes back when it is destroyed. nullptr: none.
  using Share = std::shared_ptr<const void>;

  LargeFrames() : state_(std::make_shared<State>()) {}
  // kExhausted: the peer, or the server, has too many.
  Result<Share> take(const std::string& key, std::uint64_t bytes);
  std::uint64_t bytes() const { return state_->bytes; }

 private:
  struct State {
    std::uint64_t bytes = 0;
    std::map<std::string, std::uint64_t> of_peer;
  };
  // Shares may outlive this.
  std::shared_ptr<State> state_;
};

}  // namespace rekindle::rpc
