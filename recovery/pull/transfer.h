#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include <boost/asio/steady_timer.hpp>
#include <boost/asio/this_coro.hpp>
#include <fmt/format.h>

#include "recovery/planner/plan.h"
#include "recovery/pull/environment.h"
#include "recovery/pull/proof_calls.h"
#include "recovery/pull/silence.h"
#include "recovery/pull/slice_source.h"
#include "recovery/pull/source_peer.h"
#include "transport/engine.h"

namespace rekindle::pull {

// A source that a plan reads from: a peer, or bytes that are mapped here already.
struct ActiveSource {
  std::string name;
  proto::Source record;              // of a peer
  std::shared_ptr<SourcePeer> peer;  // null for local bytes
  std::shared_ptr<const Layout> layout;
  // What it is known to hold while it is being filled; nullopt: all of the layout.
  std::optional<TileSet> held;
  std::vector<std::span<const std::byte>> local_segments;
  std::shared_ptr<const void> keep_alive;  // of local_segments

  // Filled while it runs.
  std::string transport;
  std::optional<PeerSession> session;
  bool connecting = false;
  std::uint64_t bytes = 0;  // verified, in this transfer
  int reconnects = 0;
  std::set<std::string> used;   // transports by handshake that have worked
  std::set<std::string> avoid;  // transports that broke again after a reconnect
  std::set<std::string> rails;  // homes of the paths that live
  bool joining = false;         // rails that are missing are being connected
  TimePoint next_join{};
  Duration join_pause{};  // doubles while it fails
  bool slow = false;      // alive, but its last slices were taken from it; not connected now
  bool denied = false;    // by a grant that has run out, which is not the source's fault
  bool lost = false;
  bool quarantined = false;
  WrongBytes wrong;  // of this transfer, when it has ended
  std::string cause;
};

// Why a source is lost that sent wrong bytes twice.
inline std::string wrong_bytes_cause(const std::string& where) {
  return fmt::format("quarantined: it sent wrong bytes of {}", where);
}

// One run of one plan over the engine: connects the sources, feeds the batch, reconnects a lost
// source once, and ends when every slice is accepted, when some slice has no source left
// (kUnavailable: plan again with fresh sources), or on an error. Nothing of it runs on after its
// end, verifications included. Control thread only, but for the observer's calls.
class Transfer final : private transport::BatchObserver {
 public:
  struct Hooks {
    std::function<void(const transport::BatchProgress&)> tick;  // about every 200 ms
    std::function<void(std::string)> note;                      // one line worth showing
    std::function<bool(const std::string&)> first_failure_of;   // a transport, in this pull
    // Before reads by such a connector land in the destination; again does nothing.
    std::function<void(transport::HandshakeConnector&)> use_memory;
  };

  Transfer(const PullEnvironment& environment, const ModelVersion& id, const Digest& root,
           std::shared_ptr<const planner::Plan> plan,
           std::shared_ptr<store::PendingVersion> destination,
           std::shared_ptr<VerifiedTiles> verified, std::shared_ptr<SourceTable> sources,
           std::string forced_transport, std::shared_ptr<PullCounters> counters,
           std::uint32_t suspicion, Silence& silence, Hooks hooks);
  ~Transfer() override;

  // Before run(): the order in which slices are wanted; empty: as numbered.
  void set_order(std::vector<transport::SliceIndex> order, std::uint64_t salt) {
    order_ = std::move(order);
    salt_ = salt;
  }
  // While it runs: the last element of the table is new.
  void admit(transport::SourceIndex index);
  // What a source that is being filled holds by now: by its own word, or the coordinator's.
  void on_have(transport::SourceIndex index, const swarm::TileRuns& held);
  void on_complete(transport::SourceIndex index);

  // A cancelled coroutine ends the batch, waits for its drain and returns kUnavailable
  // ("cancelled"); it must have been told not to throw (this_coro::throw_if_cancelled(false)).
  async::Task<Result<void>> run();
  // After it: what several sources brought together and nobody can be blamed for.
  WrongBytes wrong_together() const { return slices_->verifier().wrong_bytes(std::nullopt); }

 private:
  struct Event {
    enum class Kind { kLost, kStarved } kind;
    transport::SourceIndex source = 0;
    std::optional<Error> cause;
    std::uint64_t additions = 0;  // of Starvation
  };

  // transport::BatchObserver, on the engine's thread.
  void on_source_lost(transport::SourceIndex source, const Error& cause) override;
  void on_starved(const transport::Starvation& starvation) override;
  void on_finished(const Result<void>& outcome) override;
  void wake();

  // transfer_connect.cc
  void start_connecting(transport::SourceIndex index);
  async::Task<void> connect_source(transport::SourceIndex index);
  async::Task<Result<void>> renew(ActiveSource& source);
  async::Task<Result<void>> open_paths(ActiveSource& source, transport::SourceIndex index);
  async::Task<Result<void>> open_offer(ActiveSource& source, transport::SourceIndex index,
                                       const PeerSession& session, const PeerSession::Offer& offer);
  void open_local(ActiveSource& source, transport::SourceIndex index);
  void add_paths(transport::SourceIndex index, transport::Paths paths);
  void warn_of_fallback(const ActiveSource& source, const std::string& transport,
                        const Error& cause);

  // transfer_rails.cc
  transport::HandshakeConnector* handshake_connector(const std::string& transport) const;
  async::Task<Result<transport::Paths>> shake_hands(transport::SourceIndex index,
                                                    PeerSession::Offer offer,
                                                    std::vector<std::string> in_use);
  static void renew_offer(ActiveSource& source, const SessionToken& token,
                          const std::string& transport, const std::string& endpoint);
  void note_lost_rails(const transport::BatchProgress& progress);
  void join_missing_rails();
  async::Task<void> join_rails(transport::SourceIndex index, PeerSession::Offer offer,
                               std::vector<std::string> in_use);
  async::Task<void> close_sessions();

  // transfer_swarm.cc
  struct Following;
  void take_in(transport::SourceIndex index);
  void follow(transport::SourceIndex index);
  static async::Task<void> watch(std::shared_ptr<Following> following,
                                 std::shared_ptr<SourcePeer> peer, SessionToken token,
                                 TileIndex tile_count);
  void stop_following(transport::SourceIndex index);
  void stop_following();
  void follow_another();

  async::Task<Result<void>> watch_batch();
  async::Task<Result<void>> drain_verifications();
  void handle_events();
  void handle_lost(transport::SourceIndex index, const Error& cause);
  void note_progress();
  void keep_peers_alive();
  void stop_connecting();
  bool starved() const { return starved_at_ == additions_; }
  void lose(transport::SourceIndex index, const std::string& cause);
  std::vector<std::string> transports_of(const ActiveSource& source) const;

  const PullEnvironment& environment_;
  const ModelVersion id_;
  const Digest root_;
  const std::shared_ptr<SourceTable> source_table_;
  SourceTable& sources_;  // *source_table_
  const std::string forced_transport_;
  Silence& silence_;
  const Hooks hooks_;
  std::vector<transport::SliceIndex> order_;
  std::uint64_t salt_ = 0;
  const std::shared_ptr<ProofCalls> proofs_;
  std::unique_ptr<PlanSliceSource> slices_;
  std::unique_ptr<transport::Batch> batch_;
  std::shared_ptr<boost::asio::steady_timer> timer_;
  int connecting_ = 0;                       // connects and reconnects under way
  std::uint64_t additions_ = 0;              // add_paths() calls
  std::optional<std::uint64_t> starved_at_;  // how many when the batch last starved
  TimePoint last_keep_alive_{};
  TimePoint last_look_{};
  std::map<transport::SourceIndex, std::shared_ptr<Following>> following_;
  std::set<transport::SourceIndex> unwatchable_;  // the watch ended, and not because it is complete

  std::mutex mutex_;
  std::deque<Event> events_;              // guarded by mutex_
  std::optional<Result<void>> finished_;  // guarded by mutex_
};

}  // namespace rekindle::pull
