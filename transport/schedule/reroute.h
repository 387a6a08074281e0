#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <unordered_map>

#include "transport/engine.h"
#include "transport/schedule/batch_sources.h"
#include "transport/schedule/progress_watch.h"
#include "transport/schedule/slice_table.h"

namespace rekindle::transport {

// The consequences of a failed slice: where it goes next, and the path or source to blame.
struct Ruling {
  enum class Blame : std::uint8_t {
    kNobody,
    // Its connection broke or stalled: the path is aborted.
    kPath,
    // A strike against the source.
    kSource,
    // Its keys or its session are no longer valid.
    kSourceIsLost,
  };
  // Another source gets the slice, if one holds it.
  bool elsewhere = false;
  bool counts_as_attempt = false;
  Blame blame = Blame::kNobody;
};
// `slow_path`: the path was aborted for want of speed.
Ruling rule_on(OpStatus status, bool slow_path);
Ruling rule_on(Verdict verdict);

// Where a slice goes after it has failed: the queue of slices that are open again, the sources that
// failed each of them, and their attempts.
class Reroutes {
 public:
  Reroutes(const SliceTable& slices, const BatchSources& sources)
      : slices_(slices), sources_(sources) {}

  // The slice failed at `source` and is open again. Returns how many attempts count so far.
  int failed(SliceIndex slice, SourceIndex source, const Ruling& ruling);
  // The slice was not sent after all. It is open again, and nothing is held against it.
  void put_back(SliceIndex slice) { queue_.push_back(slice); }
  void accepted(SliceIndex slice) { history_.erase(slice); }

  // The next open slice of the queue that `source` may serve. It stays in the queue.
  std::optional<SliceIndex> next(SourceIndex source);
  // Whether `source` holds the slice and has not failed it. A source that has failed it is still
  // better than none.
  bool may_serve(SourceIndex source, SliceIndex slice, const SliceInfo& info) const;

  std::uint64_t count() const { return count_; }

 private:
  struct History {
    SourceMask failed_at;
    std::uint8_t attempts = 0;
  };

  const SliceTable& slices_;
  const BatchSources& sources_;
  // Entries that were posted meanwhile are dropped when next() finds them.
  std::deque<SliceIndex> queue_;
  // Of the few slices that have failed.
  std::unordered_map<SliceIndex, History> history_;
  std::uint64_t count_ = 0;
};

// How the end of a batch is kept from waiting for slow sources. Near the end, a source gets no
// slice that the others would finish much sooner. A slice that is stuck at a slow source while a
// fast one idles is stolen.
class Stragglers {
 public:
  Stragglers(const SliceTable& slices, const BatchSources& sources, const Reroutes& reroutes,
             const BatchOptions& options)
      : slices_(slices), sources_(sources), reroutes_(reroutes), options_(options) {}

  // Would the others fetch all open slices long before `source` fetched this one?
  bool others_finish_sooner(SourceIndex source, SliceIndex slice, const SliceInfo& info) const;
  // Whether `source` has nothing in flight and is known to be fast enough to steal.
  bool can_steal(SourceIndex source) const;
  // A path whose slices `thief` would fetch much sooner.
  std::optional<PathId> find_victim(SourceIndex thief) const;

 private:
  bool is_victim(PathId path, SourceIndex thief) const;

  const SliceTable& slices_;
  const BatchSources& sources_;
  const Reroutes& reroutes_;
  const BatchOptions& options_;
};

}  // namespace rekindle::transport
