#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "src/base/clock.h"
#include "transport/path.h"

namespace rekindle::transport {

// The rail at the other end, by the description of a path between two rails: "verbs mlx5_0:1
// 10.0.0.2 -> mlx5_1:1 10.0.0.3".
std::string peer_rail_of(const std::string& description);

// The paths that a cut silences. An empty member fits every path.
struct LinkFilter {
  std::string peer;
  // Of this host, and of the peer.
  std::string rail;
  std::string peer_rail;
};

// Silence on purpose, for `rekindle drill cut-link`. A silent path takes no op and reports nothing,
// as if its link carried no bit: no error, no close. Memory and connection stay as they are. When
// the time of the cut is over, each path goes on by itself. abort() works as ever, and its drain
// reports every op as aborted. Thread-safe.
class LinkCuts {
 public:
  struct Route {
    // The version whose pull reads over the path: "m@1". "": no pull does.
    std::string reader;
    std::string peer;
    std::string description;
    // The last cut has silenced it.
    bool silenced = false;
    // From then until the path was aborted in its silence.
    std::optional<Duration> noticed_after;
    bool ended = false;
    // Landed since the last cut began.
    std::uint64_t bytes = 0;
  };

  // The path, under the cuts. It costs a relaxed load for each call while there is none.
  std::unique_ptr<Path> guard(std::unique_ptr<Path> path, std::string peer, std::string reader);

  // Silences the paths that fit, and those that come before `until`. A cut replaces an earlier one.
  void cut(LinkFilter filter, TimePoint now, TimePoint until);
  // Ends the cut at once.
  void heal();
  // 0: no cut holds.
  Duration left(TimePoint now) const;
  // The paths that there are, and those that have ended since the last cut began, unless there are
  // too many.
  std::vector<Route> routes() const;

 private:
  class SilentPath;
  // A path, as its poller and this object share it.
  struct Link {
    std::string reader;
    std::string peer;
    std::string description;
    std::string rail;
    std::string peer_rail;
    // In nanoseconds of the steady clock. 0: the path is not silent.
    std::atomic<std::int64_t> silent_until = 0;
    // 0: not yet.
    std::atomic<std::int64_t> noticed_at = 0;
    std::atomic<bool> ended = false;
    std::atomic<std::uint64_t> bytes = 0;
    // Guarded by mutex_ of LinkCuts.
    bool silenced = false;
    std::uint64_t bytes_before = 0;
  };

  bool fits(const Link& link) const;
  void silence(Link& link) const;
  void forget_ended();

  mutable std::mutex mutex_;
  // Guarded by mutex_, as are the rest.
  std::vector<std::shared_ptr<Link>> links_;
  LinkFilter filter_;
  TimePoint began_{};
  TimePoint until_{};
};

}  // namespace rekindle::transport
