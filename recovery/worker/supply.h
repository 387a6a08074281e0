#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <boost/asio/any_io_executor.hpp>

#include "recovery/worker/core/session.h"
#include "recovery/worker/host.h"
#include "recovery/worker/kept_parts.h"
#include "recovery/worker/portion.h"
#include "src/base/lease.h"
#include "src/async/notifier.h"
#include "src/tensor/checkpoint.h"

namespace rekindle::worker {

// A copy that sessions are served from: here, or on its way. The ladder's rungs, one after the
// other: local → adopted → peers → fallback. Control thread only.
class Supply {
 public:
  using Files = std::vector<std::shared_ptr<const store::MappedSegment>>;
  struct View {
    std::shared_ptr<const Checkpoint> checkpoint;
    std::shared_ptr<const store::StoredVersion> stored;  // null while it arrives
    std::shared_ptr<const Portion> portion;
    std::vector<UniqueFd> segments;  // opened for reading
    // The same; whoever they are lent to, their memory is not written anew while these are kept.
    Files files;
    Rung rung = Rung::kLocal;
  };
  Supply(Host& host, RecentPortions& recent, Wanted wanted,
         const boost::asio::any_io_executor& executor)
      : changed(executor), host_(host), recent_(recent), wanted_(std::move(wanted)) {}

  // Until it is complete or has failed.
  async::Task<void> run();

  const View* view() const { return view_ ? &*view_ : nullptr; }  // null: not known yet
  bool complete() const { return complete_; }
  // A file of the copy has changed since it was verified.
  bool suspect() const;
  const std::optional<Error>& failed() const { return failed_; }
  // Another pull fills the same files: it is tried again for as long as somebody has interest().
  const std::optional<Error>& held_up() const { return held_up_; }
  std::shared_ptr<const bool> interest() const { return interest_; }
  // While somebody keeps what hold() gives, and nobody else wants it now, nothing is fetched for
  // it: a broadcast may bring it. What is here, and how it is laid out, is known all the same.
  std::shared_ptr<const bool> hold() const { return hold_; }
  void want_now() { wanted_now_ = true; }
  // For a device that writes to the copy's segments: until it lets go nothing is fetched, whoever
  // wants it. Empty: fetching has begun, or there is nothing to fetch.
  Lease write();
  // What it has kept of a party's buckets, before it lets go.
  void landed(const std::string& party, std::span<const bucket::KeptTiles> kept);
  TileSet verified() const { return verified_ ? verified_->snapshot() : TileSet(); }
  Phase phase() const { return phase_; }
  const Wanted& wanted() const { return wanted_; }

  async::Notifier changed;

 private:
  async::Task<Result<bool>> serve_local();
  async::Task<Result<void>> serve_pull();
  async::Task<Result<void>> pull_once();
  Result<void> set_view(View view);
  pull::PullRequest request() const;
  void on_begun(pull::Arriving arriving);

  Host& host_;
  RecentPortions& recent_;
  const Wanted wanted_;
  std::optional<View> view_;
  std::shared_ptr<const pull::VerifiedTiles> verified_;
  bool complete_ = false;
  std::optional<Error> failed_;
  std::optional<Error> held_up_;
  bool place_taken_ = false;  // by another pull, when the last try failed
  const std::shared_ptr<const bool> interest_ = std::make_shared<const bool>(true);
  const std::shared_ptr<const bool> hold_ = std::make_shared<const bool>(true);
  bool wanted_now_ = false;
  std::shared_ptr<pull::Placing> placing_;
  std::optional<KeptParts> kept_parts_;
  Phase phase_ = Phase::kPlan;
  bool from_fallback_ = false;
};

// The supplies under way, by what is wanted.
class Supplies {
 public:
  Supplies(Host& host, boost::asio::any_io_executor executor);
  async::Task<void> close(std::chrono::milliseconds deadline);
  std::shared_ptr<Supply> get(const Wanted& wanted);

 private:
  async::Task<void> run(std::shared_ptr<Supply> supply);

  Host& host_;
  const boost::asio::any_io_executor executor_;
  RecentPortions recent_;
  std::map<Wanted, std::shared_ptr<Supply>> running_;
  async::TaskGroup tasks_;
};

}  // namespace rekindle::worker
