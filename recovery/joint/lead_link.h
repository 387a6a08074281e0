#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "proto/agent.pb.h"
#include "recovery/joint/course.h"
#include "recovery/joint/joint_roster.h"
#include "src/async/task.h"
#include "src/base/digest.h"
#include "src/base/result.h"
#include "src/tensor/tile.h"

namespace rekindle::joint {

// What one agent tells the lead of a joint publication, and what it knows from it. The lead's own
// agent has one, too. Each call ends with the patience of JointPeer. Control thread only.
class LeadLink {
 public:
  // Both outlive it.
  LeadLink(const Roster& roster, Course& course) : roster_(roster), course_(course) {}

  // Follows the lead's phase until the publication is complete or ended, and ends the course with
  // it. A silent lead ends it, too, after the patience of JointPeer.
  async::Task<void> watch();
  // The lead has come as far.
  async::Task<Result<void>> reach(proto::JointPhase phase);
  // From JOINT_COMMITTING on.
  Digest root() const;
  std::vector<VersionSignature> signatures() const;

  async::Task<Result<void>> declare(std::string declarations);
  // The declarations of each host.
  async::Task<Result<std::vector<std::string>>> read_table();
  // In pages.
  async::Task<Result<void>> put_leaves(std::span<const TileIndex> tiles,
                                       std::span<const Digest> leaves);
  // All leaves are sent. nullopt: this host has no copy.
  async::Task<Result<void>> put_layout(std::optional<Digest> layout);
  // kCorrupt: more than `most`.
  async::Task<Result<std::vector<Digest>>> read_leaves(std::uint64_t most);
  // The layouts of all copies, ascending.
  async::Task<Result<std::vector<Digest>>> read_layouts();
  async::Task<Result<void>> confirm();
  // Tried once: a lead that does not hear it misses this agent.
  async::Task<void> give_up(Error why);

 private:
  async::Task<Result<void>> call(proto::JointRequest request);
  async::Task<Result<std::vector<Digest>>> read_digests(proto::JointRead::Kind kind,
                                                        std::uint64_t most);
  // kCorrupt: more than `most_bytes`.
  async::Task<Result<std::string>> read(proto::JointRead read, std::uint64_t most_bytes);

  const Roster& roster_;
  Course& course_;
  // As the lead has said last.
  proto::JointState state_;
};

}  // namespace rekindle::joint
