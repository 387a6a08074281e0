#pragma once

#include <map>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "recovery/coordinator/core/source_standing.h"
#include "recovery/coordinator/core/types.h"
#include "src/base/fair_places.h"

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
  // Every source that it was ever offered. Its reports on others do not count.
  std::set<Incarnation> granted = {};
  // This coordinator has resolved its version and offered its sources. A pull that was adopted
  // after a restart accuses nobody.
  bool opened_here = false;

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
  // How many shares of this source, which has `limit`, a party may still take (see places_left()).
  std::size_t shares_left(const Incarnation& source, std::size_t limit,
                          const std::string& party) const;
  // The number of open pulls of this version, by the party of the puller.
  const PlacesTaken& pulls_of(const ModelVersion& id) const;
  // The number of pulls of this version that read there.
  std::size_t readers_of(const Incarnation& source, const ModelVersion& id) const;
  const std::map<PullId, Pull>& all() const { return pulls_; }

 private:
  struct Closed {
    TimePoint at;
    Incarnation by;
  };

  using Place = std::map<PullId, Pull>::iterator;
  Place end(Place pull);
  template <typename Predicate>
  void end_where(const Predicate& over);

  const Duration lease_;
  const std::size_t max_pulls_;
  std::map<PullId, Pull> pulls_;
  std::map<PullId, Closed> closed_;
  // How many pulls have each source in `Pull::sources`.
  std::map<Incarnation, PlacesTaken> shares_;
  std::map<ModelVersion, PlacesTaken> by_version_;
};

// The pulls that found every source busy. First come those of the parties that have the fewest open
// pulls of the version, of them the longest waiting one. A puller keeps its place as long as it
// asks again in time; free shares go to the front of the queue.
class PullQueue {
 public:
  explicit PullQueue(std::size_t max_waiting) : max_waiting_(max_waiting) {}

  // The number of other pulls of the same version before and behind this one. All are before a pull
  // that does not wait.
  struct Place {
    std::size_t ahead = 0;
    std::size_t behind = 0;
  };
  // `open`: the open pulls of the version, by party.
  Place place_of(const Pull& pull, const PlacesTaken& open) const;
  // Enters the pull, or renews its place. It is to ask again after `retry_after`.
  void enter(const Pull& pull, Duration retry_after, TimePoint now);
  void leave(const Pull& pull);
  void expire(TimePoint now);
  // Excuses the time for which the coordinator slept.
  void shift(Duration by);
  std::size_t size() const { return waiting_.size(); }

 private:
  struct Waiting {
    Incarnation puller;
    std::string party;
    ModelVersion id;
    std::string shard;
    TimePoint expires;

    bool is(const Pull& pull) const {
      return puller == pull.puller.incarnation && id == pull.id && shard == pull.shard;
    }
  };

  const std::size_t max_waiting_;
  std::vector<Waiting> waiting_;
};

}  // namespace rekindle::coordinator
