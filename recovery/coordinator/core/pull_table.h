#pragma once

#include <map>
#include <span>
#include <string>
#include <vector>

#include "recovery/coordinator/core/source_standing.h"
#include "recovery/coordinator/core/types.h"

namespace rekindle::coordinator {

// One open pull.
struct Pull {
  NodeInfo puller;
  ModelVersion id;
  Digest root;
  std::string shard;
  TimePoint opened;
  TimePoint last_progress;
  std::uint64_t bytes_done = 0;
  std::uint64_t bytes_total = 0;
  double bytes_per_second = 0;
  SourceReports reports;
  // Sorted. The pull has a share of each; PullTable changes it.
  std::vector<Incarnation> sources;

  bool has_share_of(const Incarnation& source) const;
};

// The open pulls with their leases, and the number of pulls that share each source. A pull ends
// when its puller closes it, or after a lease without progress.
class PullTable {
 public:
  PullTable(Duration lease, std::size_t max_pulls) : lease_(lease), max_pulls_(max_pulls) {}

  // nullptr: there is no such pull.
  Pull* find(const PullId& id);
  bool full() const { return pulls_.size() >= max_pulls_; }
  Pull& add(const PullId& id, Pull pull);
  // kDenied: another process opened it. A pull that is not known is remembered as closed, too.
  Result<void> close(const PullId& id, const Incarnation& puller, TimePoint now);
  // A late report must not bring a closed pull back.
  bool was_closed_by(const PullId& id, const Incarnation& puller) const;
  // Ends the pulls of the same process for the same thing: it asks again because an answer was
  // lost.
  void drop_like(const Incarnation& puller, const ModelVersion& id, const std::string& shard);
  void expire(TimePoint now);
  // Excuses the time for which the coordinator slept.
  void shift(Duration by);

  void take_share(Pull& pull, const Incarnation& source);
  void drop_share(Pull& pull, const Incarnation& source);
  // Drops the shares of all other sources.
  void keep_shares_of(Pull& pull, std::span<const Incarnation> sources);

  // The number of pulls that have a share of this source.
  std::size_t pullers_of(const Incarnation& source) const;
  // The number of pulls of this version that read there.
  std::size_t readers_of(const Incarnation& source, const ModelVersion& id) const;
  const std::map<PullId, Pull>& all() const { return pulls_; }

 private:
  struct Closed {
    TimePoint at;
    Incarnation by;
  };

  template <typename Predicate>
  void end_where(const Predicate& over);

  const Duration lease_;
  const std::size_t max_pulls_;
  std::map<PullId, Pull> pulls_;
  std::map<PullId, Closed> closed_;
  // How many pulls have each source in `Pull::sources`.
  std::map<Incarnation, std::size_t> shares_;
};

}  // namespace rekindle::coordinator
