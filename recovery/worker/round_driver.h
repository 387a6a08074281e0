#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "recovery/worker/agent_host.h"
#include "recovery/worker/host_rounds.h"
#include "recovery/worker/version_feed.h"
#include "src/async/task.h"
#include "src/async/task_group.h"

namespace rekindle::worker {

// What rounds ask of the sessions here, and tell them. Unknown sessions are ignored.
class RoundSessions {
 public:
  virtual ~RoundSessions() = default;
  // Its host's copy is committed.
  virtual bool has_complete_copy(SessionId session) const = 0;
  virtual void note_round_event(SessionId session, const char* kind) = 0;
  virtual void receive_broadcast(SessionId session) = 0;
  // The round brings the session nothing more. `all`: it was given every byte.
  virtual void leave_round(SessionId session, bool all, const std::string& why) = 0;
};

// Carries out the broadcast rounds of the sessions here (docs/internals/rounds.md): reports members
// to the coordinator, passes its orders to the device process, keeps feeds from fetching what a
// round may bring, and lets devices write passing buckets into the copy that waits. HostRounds
// holds the rules. Control thread only.
class RoundDriver final : private RoundEffects {
 public:
  // All references outlive this.
  // `broadcasts`: as for HostRounds.
  RoundDriver(FleetHost& fleet, DeviceHost& devices, RoundSessions& sessions,
              async::TaskGroup& tasks, boost::asio::any_io_executor executor, bool broadcasts);

  // --- sessions; those without a group change nothing
  void attach(SessionId session, HostRounds::Origin origin);
  // The session gets this version from the feed, which is paused if a round may bring the bytes.
  void choose(SessionId session, const ModelVersion& id, const std::shared_ptr<VersionFeed>& feed);
  // Just before the hand-over: whether its device waits for a party.
  bool enters(SessionId session, VersionFeed& feed);
  // `alone`: why it gets no buckets of a round.
  void hand_over(SessionId session, const VersionFeed::View& view,
                 std::optional<std::string> alone);
  // The session has all bytes of `id` from elsewhere, and takes part in no round.
  void have_all(SessionId session, const ModelVersion& id);
  void commit(SessionId session);
  void report_phases(SessionId session, const rpc::PhaseTimes& phases);
  void fail(SessionId session, const std::string& why);
  void detach(SessionId session);
  void retired(const ModelVersion& id) { rounds_.retired(id); }

  // --- the device process
  void device_joined(const device::DeviceJoined& joined);
  void share_wanted(const device::ShareWanted& wanted);
  void spread_progress(SessionId session, std::uint64_t bytes);
  void spread_over(const device::SpreadOver& over);
  void device_over(const device::DeviceOver& over);
  void meeting_id(std::uint64_t number, const Result<std::string>& id);

  const HostRounds& rounds() const { return rounds_; }
  // Notified when the coordinator's orders have come.
  async::Notifier& orders_changed() { return orders_changed_; }

 private:
  // A feed that fetches nothing while its session waits for a round.
  struct Paused {
    std::shared_ptr<VersionFeed> feed;
    Lease pause;
  };
  // A device that writes to the feed's copy.
  struct Keeper {
    std::shared_ptr<VersionFeed> feed;
    Lease writing;
    std::string party;
  };
  // The shares of one party that this host fetches into one copy. They come side by side, so all of
  // its ranks must have named their tiles.
  struct Shares {
    std::vector<SessionId> sessions;
    std::set<SessionId> awaited;
    std::vector<TileRuns> lists;
  };
  void spread(const device::SpreadOrder& order) override;
  void stop_spread(SessionId session, const std::string& why) override;
  void make_meeting_id(std::uint64_t number) override;
  void left_round(SessionId session, bool all, const std::string& why) override;
  // A session whose device sends a share that this host fetches.
  struct Fetching {
    std::shared_ptr<VersionFeed> feed;
    std::string party;
  };
  void await_share(const device::SpreadOrder& order);
  void take_share(SessionId session, TileRuns tiles);
  async::Task<void> tell_share(SessionId session, std::shared_ptr<VersionFeed> feed);
  bool begin_keeping(const device::SpreadOrder& order);
  void end_keeping(const device::SpreadOver& over);
  void changed();
  async::Task<void> run();
  async::Task<void> ask_for_orders(bool wait);

  FleetHost& fleet_;
  DeviceHost& devices_;
  RoundSessions& sessions_;
  async::TaskGroup& tasks_;
  HostRounds rounds_;
  std::map<SessionId, Paused> paused_;
  std::map<SessionId, Keeper> keepers_;  // until their spread is over
  // By communicator and feed, until all tiles are named.
  std::map<std::pair<std::string, const VersionFeed*>, Shares> shares_;
  // Until their spread is over.
  std::map<SessionId, Fetching> fetching_;
  // A pull may outlive this object and then report that it could not fetch a share.
  const std::shared_ptr<const char> alive_ = std::make_shared<const char>();
  bool running_ = false;
  // Two questions to the coordinator may be under way: one is answered when there are orders, the
  // other at once.
  bool waiting_question_ = false;
  bool prompt_question_ = false;
  TimePoint ask_after_{};
  async::Notifier news_;
  async::Notifier orders_changed_;
};

}  // namespace rekindle::worker
