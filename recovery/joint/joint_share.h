#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <boost/asio/any_io_executor.hpp>

#include "proto/agent.pb.h"
#include "recovery/joint/joint_agent.h"
#include "recovery/joint/joint_peer.h"
#include "recovery/joint/lead_desk.h"
#include "recovery/joint/local_ranks.h"
#include "recovery/joint/part_digests.h"
#include "recovery/joint/tile_finisher.h"
#include "src/async/task_group.h"
#include "src/store/segment_store.h"
#include "src/tensor/joint_plan.h"

namespace rekindle::joint {

// The agents of a complete roster, as one of them sees them.
struct Roster {
  struct Host {
    proto::NodeAddress node;
    std::vector<std::uint32_t> ranks;
    std::unique_ptr<JointPeer> peer;
  };
  std::uint64_t number = 0;
  std::vector<Host> hosts;  // the first one is the lead
  std::uint32_t self = 0;

  // `over`: as for JointPeer. kInvalid: the roster does not have `identity`.
  static Result<Roster> from_proto(const proto::JointRoster& roster, const rpc::Identity& identity,
                                   std::function<bool()> over);
  JointPeer& lead() const { return *hosts.front().peer; }
  bool leads() const { return self == 0; }
  std::span<const std::uint32_t> ranks() const { return hosts[self].ranks; }
};

// Where a rank writes: the places of its boxes in files that its agent makes.
struct RankPlaces {
  TensorSet tensors;
  PackedLayout packed;
};

// One agent's share in one joint publication: its ranks and its copy, and, at the agent of rank 0,
// the lead. docs/internals/joint-publication.md has the steps. Control thread only.
class JointShare : public std::enable_shared_from_this<JointShare> {
 public:
  JointShare(boost::asio::any_io_executor executor, JointAgent& agent, ModelVersion id,
             std::uint32_t world);

  const ModelVersion& id() const { return id_; }
  // 0: the roster is not complete.
  std::uint64_t roster() const { return roster_.number; }
  // Complete or ended: new ranks begin another share.
  bool over() const { return root_ || error_; }

  // The calls of ranks. kTimeout names what is missing.
  async::Task<Result<RankPlaces>> declare(std::uint32_t world, Declaration declaration,
                                          std::uint64_t owner, TimePoint give_up);
  // Returns the root when every agent has confirmed. A failed call leaves the committed bytes
  // where they are, for the other ranks: `files` is kept as long as they are needed.
  async::Task<Result<Digest>> commit(std::uint32_t rank, std::uint64_t owner,
                                     store::FilledSegments filled, std::shared_ptr<void> files,
                                     TimePoint give_up);
  void leave(std::uint32_t rank, std::uint64_t owner);

  // A call of another agent of the roster.
  async::Task<Result<proto::JointResponse>> answer(rpc::Peer peer, proto::JointRequest request);

  // Takes all steps, then answers other agents for a while.
  async::Task<void> run();
  void end(Error why);

 private:
  async::Task<Result<void>> take_steps();
  async::Task<Result<void>> gather();
  void note_undeclared(const Result<proto::JointRoster>& roster);
  async::Task<Result<void>> exchange_declarations();
  async::Task<Result<std::string>> read_from_lead(proto::JointRead read);
  async::Task<Result<void>> make_plan(std::vector<std::string> declarations);
  async::Task<Result<void>> stage();
  async::Task<Result<void>> send_leaves();
  async::Task<Result<void>> send_pieces();
  async::Task<void> send_round(std::uint32_t to, proto::JointPieces pieces,
                               std::optional<Error>& failed);
  async::Task<Result<void>> finish_tiles();
  async::Task<Result<void>> commit_copy();
  async::Task<void> watch_lead();
  async::Task<void> keep_time();
  async::Task<void> keep_roster();
  async::Task<void> say_goodbye();
  async::Task<void> drop_files();
  proto::JointReport report_on(std::span<const std::uint32_t> ranks) const;

  // Waits until `holds()`. The error of the publication if it ends, kTimeout at `give_up`.
  template <typename Condition>
  async::Task<Result<void>> wait_for(Condition holds, TimePoint give_up = TimePoint::max());
  proto::JointRequest request() const;
  async::Task<Result<void>> put_all_leaves(std::span<const TileIndex> tiles,
                                           std::span<const Digest> leaves, bool last);
  async::Task<Result<void>> put_leaves(std::span<const TileIndex> tiles,
                                       std::span<const Digest> leaves, bool last);
  async::Task<Result<std::uint32_t>> take_pieces(std::uint32_t from, proto::JointPieces pieces);
  Result<void> check_own_leaves(const Checkpoint& checkpoint) const;
  std::string whom_it_lacks() const;

  JointAgent& agent_;
  const ModelVersion id_;
  // Tells the coordinator this share from an earlier one of the same version.
  const std::uint64_t attempt_;
  LocalRanks ranks_;
  // The ranks that have declared nowhere, as the coordinator knows.
  std::string undeclared_;
  Roster roster_;
  std::unique_ptr<LeadDesk> lead_;  // null at other agents than the lead
  // As the lead has said last.
  proto::JointState lead_state_;

  std::shared_ptr<const JointPlan> plan_;
  std::map<std::uint32_t, PackedLayout> packed_;  // of each rank here
  std::vector<std::shared_ptr<void>> files_;      // of the ranks that have committed
  std::shared_ptr<store::SegmentStore::StagedPart> staged_;
  std::unique_ptr<PartReader> part_;
  std::vector<Digest> leaves_;  // of part_->tiles().whole
  std::unique_ptr<TileFinisher> finisher_;

  std::optional<Digest> root_;  // of the complete version
  std::optional<Error> error_;
  async::Notifier changed_;
  async::TaskGroup tasks_;
};

}  // namespace rekindle::joint
