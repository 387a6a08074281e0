#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "recovery/pull/direct_reads.h"
#include "recovery/worker/agent_host.h"
#include "recovery/worker/core/worker_session.h"
#include "recovery/worker/portion.h"
#include "src/async/task.h"
#include "src/async/task_group.h"
#include "src/base/lease.h"
#include "src/bucket/segment_keep.h"
#include "src/tensor/checkpoint.h"

namespace rekindle::worker {

// Counts the parts of tiles that several devices keep of passing buckets. Pure.
class KeptParts {
 public:
  explicit KeptParts(TileIndex tile_count) : tile_count_(tile_count) {}

  // Adds the tiles that a device has kept of a party's buckets. Returns the tiles that are whole
  // now, as ascending runs.
  TileRuns add(const std::string& party, std::span<const bucket::KeptTiles> kept);

 private:
  const TileIndex tile_count_;
  // By party and tile, of tiles that are not whole yet. Parties have different buckets.
  std::map<std::pair<std::string, TileIndex>, std::uint32_t> parts_;
};

// Brings one version, or a part of it, to the sessions that want it. It takes the rungs of the
// ladder one after the other: local, adopted, peers, fallback. Control thread only.
class VersionFeed {
 public:
  using Files = std::vector<std::shared_ptr<const store::MappedSegment>>;
  // Where the bytes are, or will be.
  struct View {
    std::shared_ptr<const Checkpoint> checkpoint;
    std::shared_ptr<const store::StoredVersion> stored;  // null while it arrives
    std::shared_ptr<const Portion> portion;
    std::vector<UniqueFd> segments;  // the files, opened for reading
    // While a holder keeps these, the store does not reuse their memory.
    Files files;
    Rung rung = Rung::kLocal;
  };
  VersionFeed(CopyHost& host, RecentPortions& recent, Wanted wanted,
              const boost::asio::any_io_executor& executor)
      : changed(executor),
        host_(host),
        recent_(recent),
        wanted_(std::move(wanted)),
        pause_changed_(std::make_shared<async::Notifier>(executor)),
        view_made_(executor),
        view_making_(executor),
        pauses_([this] { pause_changed_->notify(); }) {}

  // Returns when the feed is complete or has failed.
  async::Task<void> run();

  const View* view() const { return view_ ? &*view_ : nullptr; }  // null: not known yet
  bool complete() const { return complete_; }
  const std::optional<Error>& failed() const { return failed_; }
  // A file of the copy has changed since it was verified.
  bool suspect() const;
  TileSet verified() const { return verified_ ? verified_->snapshot() : TileSet(); }
  Phase phase() const { return phase_; }
  const Wanted& wanted() const { return wanted_; }
  // The device of a worker that waits for the feed ("": none). The copy of a pull lies near those
  // that are known when it begins.
  void read_by(std::string device);
  // The attach for which the feed was begun: its pull belongs to it.
  void belongs_to(const trace::Context& attach) { trace_ = attach; }
  const trace::Context& trace() const { return trace_; }
  // Its pull reads straight into GPU memory first. False: it has begun, or other sessions wait for
  // it, too. For several GPUs the bytes come to this host once.
  bool read_directly(std::shared_ptr<pull::DirectReads> reads);

  // Why the feed waits: another pull fills the same files. The feed tries again while somebody
  // holds an interest().
  const std::optional<Error>& obstacle() const { return obstacle_; }
  Lease interest() { return interests_.grant(); }

  // Keeps the feed from fetching, because a broadcast may bring the bytes, until want_now(). The
  // view becomes known all the same.
  Lease pause() { return pauses_.grant(); }
  void want_now() {
    wanted_now_ = true;
    pause_changed_->notify();
  }

  // For a device that writes to the copy's segments. The feed fetches nothing until the device lets
  // go, not even after want_now(). An empty lease: the feed has begun to fetch, or has nothing to
  // fetch.
  Lease write();
  // It waits with its fetching, and can fetch some tiles at once.
  bool can_fetch_now() const;
  // As Placing::fetch_now().
  void fetch_now(std::vector<TileRuns> lists, pull::Placing::OnFailure on_failure);
  // What the device has kept of a party's buckets. Comes before it lets go.
  void landed(const std::string& party, std::span<const bucket::KeptTiles> kept);

  async::Notifier changed;

 private:
  async::Task<Result<bool>> serve_local();
  async::Task<Result<void>> serve_pull();
  async::Task<Result<void>> pull_once();
  Result<void> set_view(View view);
  pull::PullRequest request() const;
  void on_begun(pull::Arriving arriving);
  async::Task<void> make_view(pull::Arriving arriving);

  CopyHost& host_;
  RecentPortions& recent_;
  const Wanted wanted_;
  std::set<std::string> devices_;
  std::optional<View> view_;
  std::shared_ptr<const pull::VerifiedTiles> verified_;
  bool complete_ = false;
  std::optional<Error> failed_;
  std::optional<Error> obstacle_;
  bool place_taken_ = false;  // by another pull, when the last try failed
  LeaseGrantor interests_;
  // The files of the pull that has begun.
  std::optional<Files> begun_;
  const std::shared_ptr<async::Notifier> pause_changed_;
  // The view of the arriving copy is being made. That ends before the pull counts as ended.
  bool making_view_ = false;
  async::Notifier view_made_;
  async::TaskGroup view_making_;
  LeaseGrantor pauses_;
  bool wanted_now_ = false;
  std::shared_ptr<pull::Placing> placing_;
  std::optional<KeptParts> kept_parts_;
  Phase phase_ = Phase::kPlan;
  trace::Context trace_;
  bool from_fallback_ = false;
  std::size_t readers_ = 0;
  bool started_ = false;
  // Null: none.
  std::shared_ptr<pull::DirectReads> direct_;
};

// The feeds under way. Sessions that want the same share one.
class VersionFeeds {
 public:
  VersionFeeds(CopyHost& host, boost::asio::any_io_executor executor);
  async::Task<void> close(std::chrono::milliseconds deadline);
  // `device`: of the worker that asks, as in AttachOrder.
  // `attach`: of its session.
  std::shared_ptr<VersionFeed> get(const Wanted& wanted, const std::string& device,
                                   const trace::Context& attach);

 private:
  async::Task<void> run(std::shared_ptr<VersionFeed> feed);

  CopyHost& host_;
  const boost::asio::any_io_executor executor_;
  RecentPortions recent_;
  std::map<Wanted, std::shared_ptr<VersionFeed>> running_;
  async::TaskGroup tasks_;
};

}  // namespace rekindle::worker
