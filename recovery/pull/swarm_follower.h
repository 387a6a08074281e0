#pragma once

#include <map>
#include <memory>
#include <set>

#include "recovery/pull/pull_policy.h"
#include "recovery/pull/slice_source.h"
#include "recovery/pull/source_table.h"
#include "src/async/task.h"
#include "src/async/task_group.h"

namespace rekindle::pull {

// Follows the sources of one transfer that are being filled themselves: as they gain tiles they
// become candidates for more slices. A source tells by a streaming call; at most
// swarm::kMaxNeighbours are followed, and for the others the coordinator's summaries have to do.
// Control thread only.
class SwarmFollower {
 public:
  // The table, the slices and the silence outlive this object.
  SwarmFollower(boost::asio::any_io_executor executor, SourceTable& sources,
                PlanSliceSource& slices, Silence& silence);
  ~SwarmFollower() { stop(); }

  // The batch knows the source from here on. Its paths may come later.
  void add(transport::SourceIndex index);
  // The source has a (new) session. Does nothing for a source that is complete.
  void follow(transport::SourceIndex index);
  // The source is lost: another one takes its place.
  void drop(transport::SourceIndex index);
  // The batch ends: nobody is followed any more, and the slices hear of nothing.
  void stop();

  // Gains of a source, as the source or the coordinator reports them.
  void on_have(transport::SourceIndex index, const swarm::TileRuns& held);
  void on_complete(transport::SourceIndex index);

 private:
  struct Listener;
  struct Following {
    explicit Following(const boost::asio::any_io_executor& executor) : call(executor) {}
    std::shared_ptr<Listener> listener;
    async::TaskGroup call;
  };
  static async::Task<void> watch(std::shared_ptr<Listener> listener,
                                 std::shared_ptr<SourcePeer> peer, SessionToken token,
                                 TileIndex tile_count);
  void ended(transport::SourceIndex index, const Result<void>& outcome);
  void cut(transport::SourceIndex index);
  void fill_places();

  const boost::asio::any_io_executor executor_;
  SourceTable& sources_;
  PlanSliceSource& slices_;
  Silence& silence_;
  std::map<transport::SourceIndex, Following> following_;
  // Sources whose call ended before they were complete.
  std::set<transport::SourceIndex> unwatchable_;
  bool stopped_ = false;
};

}  // namespace rekindle::pull
