#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "proto/coordinator.pb.h"
#include "recovery/device/device_order.h"
#include "recovery/device/order.h"
#include "recovery/worker/core/session.h"
#include "recovery/worker/core/worker_session.h"
#include "src/base/clock.h"
#include "src/base/digest.h"
#include "src/base/ids.h"
#include "src/base/result.h"

namespace rekindle::worker {

// What follows from rounds for the sessions here; carried out at once.
class RoundEffects {
 public:
  virtual ~RoundEffects() = default;
  virtual void spread(const device::SpreadOrder& order) = 0;
  virtual void stop_spread(SessionId session, const std::string& why) = 0;
  virtual void make_meeting_id(std::uint64_t number) = 0;
  // The round brings this session nothing more: it was given every byte, or `why` not.
  virtual void left_round(SessionId session, bool all, const std::string& why) = 0;
};

struct RoundTimes {
  std::chrono::milliseconds coordinator{10'000};  // without an answer of it: members go on alone
  std::chrono::milliseconds remember{5000};       // members that have ended
  std::chrono::milliseconds discard{60'000};      // a rank whose worker has gone, in its party
  std::chrono::milliseconds progress{200};        // between reports of nothing else
};

// The members of broadcast rounds on this host (docs/rounds.md): the sessions with a group. Pure:
// events and time in, effects out. Control thread only.
class Rounds {
 public:
  explicit Rounds(RoundEffects& effects, RoundTimes times = {})
      : effects_(effects), times_(times) {}

  // --- sessions; those without a group are unknown here, and change nothing
  struct Origin {
    std::string group;
    std::string instance;
    std::uint32_t rank = 0;
    std::string model;
    std::string device;  // "" = none
  };
  void attach(SessionId session, Origin origin);
  // The version it gets. True: a round gathers for it, and may bring it.
  bool choose(SessionId session, const ModelVersion& id);
  // Just before it is handed over: whether it waits for its party on its device.
  bool enters(SessionId session);
  // It was handed over. `alone`: why it gets no buckets of a round.
  void hand_over(SessionId session, const Digest& root, std::optional<std::string> alone);
  void commit(SessionId session);
  void fail(SessionId session, const std::string& why, TimePoint now);
  void detach(SessionId session, TimePoint now);

  // --- the device process. `owner`: all of it is in this host's memory.
  void joined(const device::DeviceJoined& joined, bool owner);
  void progress(SessionId session, std::uint64_t bytes);
  void spread_over(const device::SpreadOver& over, TimePoint now);
  void device_over(const device::DeviceOver& over, TimePoint now);
  void meeting_id(std::uint64_t number, const Result<std::string>& id);

  // --- the coordinator
  proto::RoundReport report(const std::string& device_life, std::chrono::milliseconds wait,
                            TimePoint now);
  // The answer to report number `sequence`.
  void obey(const proto::RoundOrders& orders, std::uint64_t sequence, TimePoint now);
  void unanswered() { seen_ = 0; }
  // Deadlines.
  void check(TimePoint now);
  bool has_members() const { return !members_.empty(); }
  // When there is something to report beside a question that waits; nullopt: nothing.
  // Nobody asks for orders any more: those that are known grow old.
  void forget_orders();
  // Members are not told of it any more.
  void retired(const ModelVersion& id);
  std::optional<TimePoint> due() const;

  // --- what sessions ask
  // The version that members of this group shall attach to now.
  std::optional<std::uint64_t> gathers(const std::string& model, const std::string& group) const;
  // The version that a session of a group, which has `have`, shall move to.
  std::optional<std::uint64_t> news_for(SessionId session, const ModelVersion& have) const;
  bool is_member(SessionId session) const { return members_.contains(session); }
  // "joined", "spreading"; "" of one that does not wait for its party.
  std::string_view phase_of(SessionId session) const;

 private:
  struct Member {
    Origin origin;
    ModelVersion id;  // version 0: not chosen, or not here yet by the round
    ModelVersion chosen;
    proto::RoundMemberState state = proto::ROUND_SERVING;
    std::uint64_t round = 0;
    Digest root;
    device::DeviceJoined joined;
    bool owner = false;
    std::uint64_t spread_bytes = 0;
    std::uint64_t kept_bytes = 0;
    std::string why;
    bool committed = false;
    bool ended = false;             // its session has
    bool worker_lost = false;       // and its device goes on, or has been through without it
    std::uint64_t reported_in = 0;  // the first report that says that it has joined
    TimePoint forget_at = TimePoint::max();
  };
  struct Known {
    ModelVersion id;
    std::string group;
    bool gathering = false;
  };
  using PartyKey = std::pair<std::uint64_t, std::uint32_t>;  // round, party
  struct Meeting {
    std::uint64_t number = 0;
    std::optional<Result<std::string>> id;
  };

  Member* find(SessionId session);
  void go_alone(SessionId session, Member& member, const std::string& why);
  void fill(SessionId session, Member& member);
  void lose_worker(SessionId session, Member& member, const std::string& why);
  void become_ready(Member& member);
  void end_discarding(Member& member, const std::optional<Error>& error, TimePoint now);
  void forget_predecessors_of(const Origin& origin);
  void obey_party(std::uint64_t round, const proto::PartyOrder& party, TimePoint now);
  void spread(SessionId session, Member& member, const proto::PartyOrder& party,
              std::uint32_t rank);
  std::vector<std::uint32_t> keepers_of(const proto::PartyOrder& party) const;
  void stop(SessionId session, Member& member, const std::string& why, TimePoint now);
  void leave_ended_rounds(const std::string& why);
  void remember(std::uint64_t round, const Known& known);
  proto::RoundMember to_proto(SessionId session, const Member& member) const;

  RoundEffects& effects_;
  const RoundTimes times_;
  std::map<SessionId, Member> members_;
  std::map<std::uint64_t, Known> rounds_;  // as last ordered
  std::map<PartyKey, Meeting> meetings_;   // ids that were asked for
  struct Last {
    std::uint64_t round = 0;
    std::uint64_t version = 0;
  };
  std::map<std::pair<std::string, std::string>, Last> last_;  // by model and group, "" = all
  std::uint64_t sequence_ = 0;                                // of the last report
  std::uint64_t answered_ = 0;                                // the last report that was
  std::uint64_t seen_ = 0;
  std::uint64_t last_meeting_ = 0;
  bool changed_ = false;
  bool progressed_ = false;
  TimePoint reported_at_{};
  std::optional<TimePoint> silent_since_;  // the coordinator
};

}  // namespace rekindle::worker
