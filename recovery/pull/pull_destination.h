#pragma once

#include <memory>
#include <optional>
#include <set>
#include <vector>

#include "recovery/pull/first_tiles.h"
#include "recovery/pull/pull_context.h"
#include "recovery/pull/pull_watch.h"
#include "src/async/task.h"
#include "src/store/segment_store.h"
#include "transport/path.h"

namespace rekindle::pull {

// The copy that a pull fills, from its place in the store to its commit. A puller becomes a source
// here: once the copy has its place, the agent serves its verified tiles (PullEnvironment::share).
// Control thread only.
class PullDestination {
 public:
  PullDestination(PullContext& context, PullWatch watch);

  // Returns a committed and verified copy that holds all wanted boxes. Null: there is none.
  async::Task<Result<std::shared_ptr<const store::StoredVersion>>> find_here();

  // Takes the place of the copy, with what an earlier pull has verified. Where the budget is too
  // small, room is made once.
  async::Task<Result<void>> begin();
  // Waits while the watch holds the pull, or somebody else writes to the copy; then takes in what
  // they have written. False: there was nothing to wait for. Returns earlier if tiles are wanted
  // now.
  async::Task<bool> wait_while_held();
  // The tiles that are wanted while the rest is held. nullopt: everything may be fetched.
  std::optional<FirstTiles> first_tiles();
  // They cannot be had now.
  void fail_first_tiles(const Error& why) { placing_->fail_wanted(why); }

  // A session's direct reads, which come before this copy is filled; null: none.
  const std::shared_ptr<DirectReads>& direct() const { return watch_.direct; }
  const std::shared_ptr<VerifiedTiles>& verified() const { return verified_; }
  std::shared_ptr<store::PendingVersion> pending() const { return {pending_, pending_->get()}; }

  // Registers the copy's memory for reads by this connector; once for all transfers.
  void use_memory(transport::HandshakeConnector& connector);
  async::Task<void> release_memory();

  async::Task<Result<std::shared_ptr<const store::StoredVersion>>> commit();
  // Nobody reads the copy any more when this returns. What has verified stays on disk, to be
  // resumed; files without any of it do not.
  async::Task<void> abandon();

 private:
  async::Task<Result<void>> begin_once();
  std::shared_ptr<const store::StoredVersion> covering_copy() const;
  bool held() const;
  async::Task<void> take_placed(Placing::TileRuns landed);
  async::Task<void> unshare();

  PullContext& context_;
  const PullEnvironment& environment_;
  const PullTarget& target_;
  const PullWatch watch_;
  // Shared with verifications; empty inside after the commit.
  std::shared_ptr<std::unique_ptr<store::PendingVersion>> pending_;
  std::shared_ptr<VerifiedTiles> verified_;
  const std::shared_ptr<async::Notifier> released_;
  const std::shared_ptr<Placing> placing_;
  std::vector<std::shared_ptr<const void>> registrations_;
  std::set<const transport::HandshakeConnector*> registered_with_;
};

}  // namespace rekindle::pull
