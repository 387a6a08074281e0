#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "proto/agent.pb.h"
#include "recovery/joint/course.h"
#include "recovery/joint/joint_roster.h"
#include "recovery/joint/part_digests.h"
#include "recovery/joint/tile_finisher.h"
#include "src/async/task.h"
#include "src/base/digest.h"
#include "src/base/worker_pool.h"

namespace rekindle::joint {

// The shared tiles of one agent: it sends the pieces of its part to their finishers, and finishes
// tiles from the pieces of all. Control thread only.
class SharedTiles {
 public:
  struct Pools {
    WorkerPool& blocking;
    WorkerPool& digests;
  };
  struct Leaves {
    std::vector<TileIndex> tiles;
    std::vector<Digest> digests;
  };

  // `finished`: the tiles of which this agent is the finisher, ascending. The pools, `roster` and
  // `course` outlive it.
  SharedTiles(Pools pools, const Roster& roster, Course& course,
              std::shared_ptr<const JointPlan> plan, std::vector<TileIndex> finished);

  // Returns when the finishers have taken all pieces. They may have to wait for hosts whose ranks
  // still write, so it ends with the publication at the latest.
  async::Task<Result<void>> send(const PartReader& part);
  // The pieces of another agent. Waits for room until `until`, and returns how many were taken.
  // Pieces that do not fit end the publication.
  async::Task<Result<std::uint32_t>> take(std::uint32_t from, proto::JointPieces pieces,
                                          TimePoint until);
  // Waits for complete tiles and digests them on the pool. None: all have been returned.
  async::Task<Result<Leaves>> next_leaves();

 private:
  async::Task<void> send_round(std::uint32_t to, proto::JointPieces pieces,
                               std::optional<Error>& failed);

  const Pools pools_;
  const Roster& roster_;
  Course& course_;
  const std::shared_ptr<const JointPlan> plan_;
  TileFinisher finisher_;
};

}  // namespace rekindle::joint
