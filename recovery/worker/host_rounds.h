#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "proto/coordinator.pb.h"
#include "recovery/device/device_order.h"
#include "recovery/rpc/update_phases.h"
#include "recovery/worker/core/worker_session.h"
#include "src/base/clock.h"
#include "src/base/digest.h"
#include "src/base/ids.h"
#include "src/base/result.h"
#include "src/bucket/round_plan.h"

namespace rekindle::worker {

// The rounds, as the coordinator last ordered them. Pure.
class KnownRounds {
 public:
  struct Round {
    ModelVersion id;
    std::string group;  // "": all groups
    bool gathering = false;
    bool concerns(const std::string& its_group) const {
      return group.empty() || group == its_group;
    }
  };

  // A report was sent.
  void asked(TimePoint now) {
    if (!silent_since_) silent_since_ = now;
  }
  // Takes the answer to report number `sequence`. False: it is older than another answer.
  bool take(const proto::RoundOrders& orders, std::uint64_t sequence);
  // The coordinator did not answer. The next answer may be another coordinator's, which counts its
  // revisions anew.
  void unanswered() { seen_ = 0; }
  // Nobody asks for orders any more, so the known ones grow old.
  void forget();
  // Members do not hear of this version any more.
  void retired(const ModelVersion& id);

  std::uint64_t seen() const { return seen_; }  // the revision of the last orders
  bool has_answered(std::uint64_t sequence) const { return answered_ >= sequence; }
  bool is_silent(TimePoint now, Duration limit) const {
    return silent_since_ && now - *silent_since_ >= limit;
  }
  const Round* find(std::uint64_t round) const;
  // The number of the round that gathers members of this group for this version; 0: none.
  std::uint64_t gathering(const ModelVersion& id, const std::string& group) const;
  // The version that members of this group attach to now, because a round gathers for it.
  std::optional<std::uint64_t> gathers(const std::string& model, const std::string& group) const;
  // The version that a member of this group, which has `have`, moves to.
  std::optional<std::uint64_t> news_for(const std::string& group, const ModelVersion& have) const;

 private:
  struct Last {
    std::uint64_t round = 0;
    std::uint64_t version = 0;
  };
  std::map<std::uint64_t, Round> rounds_;
  std::map<std::pair<std::string, std::string>, Last> last_;  // by model and group
  std::uint64_t answered_ = 0;                                // the last report with an answer
  std::uint64_t seen_ = 0;
  std::optional<TimePoint> silent_since_;
};

// Of a session's contents, in order. There may be tens of thousands.
using WantedPieces = std::shared_ptr<const std::vector<bucket::PieceKey>>;

// One session's part in broadcast rounds. Pure. A session of a group is a member from its attach
// on:
//
//   serving ──join──▶ joined ──spread──▶ spreading ──fill──▶ filled ──commit──▶ ready
//                        └──────────────────┴── go_alone ──▶ alone ──commit──▶ ready
//   and leave_round() back to serving; fail() and lose_worker() to failed.
class RoundMember {
 public:
  struct Origin {
    std::string group;
    std::string instance;
    std::uint32_t rank = 0;
    std::string model;
    std::string device;  // "": none
  };
  using State = proto::RoundMemberState;
  // The bytes that the session wants: its host has all of them; or can fetch some of them at once,
  // while the others are to come by the round; or neither.
  enum class Bytes { kNone, kFetchable, kAll };

  explicit RoundMember(Origin origin);

  // The version that the session gets; `round`: the one that may bring it, or 0.
  void choose(const ModelVersion& id, std::uint64_t round);
  void hand_over(const Digest& root) { root_ = root; }
  // The contents that it has or is getting.
  void want(const Digest& contents, std::uint64_t payload_bytes, WantedPieces pieces) {
    joined_.contents = contents;
    joined_.payload_bytes = payload_bytes;
    pieces_ = std::move(pieces);
  }
  // The version arrives by another way than a join.
  void take_chosen() { id_ = chosen_; }
  // It has its buckets and waits for its party.
  void join(const device::DeviceJoined& joined, Bytes here);
  void spread() { state_ = proto::ROUND_SPREADING; }
  // True if there is progress.
  bool progress(std::uint64_t bytes);
  // What its device says at the end of the spread.
  void end_spread(const device::SpreadOver& over, TimePoint now);
  // Its device was given every byte of the round. `more`: others come from its host.
  void fill(bool more);
  // It gets the rest of its bytes without the round.
  void go_alone(const std::string& why);
  // Its device has been through the round without the worker. The party is well.
  void lose_worker(const std::string& why);
  void commit();
  // As its worker measured them.
  void take_phases(const rpc::PhaseTimes& phases, TimePoint now) {
    phases_ = phases;
    phases_came_ = now;
    state_report_ = 0;
  }
  // The round is over, or the session does not take part in it.
  void leave_round();

  // --- the end of its session. The member stays for a while, so that the coordinator hears of it.
  // True if its device is in the round, goes on, and discards.
  bool fail(const std::string& why);
  // The device of an ended session is done. A party that has lost only a worker has not failed.
  // False: the device was not in a round.
  bool end_discarding(bool device_failed);
  // It detached: to attach to a version that a round gathers for, or with a result.
  void detach() { ended_ = true; }
  void forget_at(TimePoint when) { forget_at_ = when; }

  const Origin& origin() const { return origin_; }
  State state() const { return state_; }
  std::uint64_t round() const { return round_; }
  const ModelVersion& id() const { return id_; }
  // It has attached to this version, and serves nothing yet.
  bool prepares(const ModelVersion& version) const {
    return id_.version == 0 && round_ == 0 && chosen_ == version;
  }
  bool ended() const { return ended_; }
  bool owner() const { return here_ == Bytes::kAll; }
  const Digest& contents() const { return joined_.contents; }
  // Null: not known yet.
  const WantedPieces& pieces() const { return pieces_; }
  // It waits for its buckets, and then for its party.
  bool waits_for_buckets() const { return round_ != 0 && state_ == proto::ROUND_SERVING; }
  // It waits for its party, or is in it.
  bool is_in_party() const {
    return state_ == proto::ROUND_JOINED || state_ == proto::ROUND_SPREADING;
  }
  // Its device was given every byte of its round, or has been through it without the worker.
  bool is_through() const {
    const bool discarded = worker_lost_ && state_ == proto::ROUND_FAILED;
    return round_ != 0 &&
           (state_ == proto::ROUND_FILLED || state_ == proto::ROUND_READY || discarded);
  }
  // Its worker detached then. The coordinator does not know the result yet.
  bool leaves_result() const { return ended_ && is_through(); }
  // The new session of the same rank takes its place.
  bool is_replaced_by(const Origin& newcomer) const;
  bool is_forgotten(TimePoint now) const { return now >= forget_at_; }
  // The first report that says its present state and phases; 0: none yet.
  std::uint64_t state_report() const { return reported_state_ == state_ ? state_report_ : 0; }
  proto::RoundMember report(SessionId session, std::uint64_t sequence, TimePoint now);

 private:
  void become_ready();
  void report_phases(proto::RoundMember& out, TimePoint now) const;

  Origin origin_;
  ModelVersion id_;  // version 0: not chosen, or not here yet by the round
  ModelVersion chosen_;
  State state_ = proto::ROUND_SERVING;
  std::uint64_t round_ = 0;
  Digest root_;
  device::DeviceJoined joined_;
  WantedPieces pieces_;
  Bytes here_ = Bytes::kNone;
  std::uint64_t spread_bytes_ = 0;
  std::uint64_t kept_bytes_ = 0;
  std::string why_;
  bool committed_ = false;
  bool ended_ = false;        // its session has
  bool worker_lost_ = false;  // its device goes on, or has been through, without the worker
  State reported_state_ = proto::ROUND_SERVING;
  std::uint64_t state_report_ = 0;
  rpc::PhaseTimes phases_;
  TimePoint phases_came_{};
  // As its device process measured them. Zero: it took part in no spread.
  std::chrono::microseconds meet_took_{};
  std::chrono::microseconds spread_took_{};
  std::chrono::microseconds verify_took_{};
  TimePoint spread_ended_{};
  TimePoint forget_at_ = TimePoint::max();
};

// The effects of rounds on the sessions of this host. The receiver carries them out at once.
class RoundEffects {
 public:
  virtual ~RoundEffects() = default;
  virtual void spread(const device::SpreadOrder& order) = 0;
  virtual void stop_spread(SessionId session, const std::string& why) = 0;
  virtual void make_meeting_id(std::uint64_t number) = 0;
  // The round brings this session nothing more. `all`: the session was given every byte. If not,
  // `why` is the reason.
  virtual void left_round(SessionId session, bool all, const std::string& why) = 0;
};

struct RoundTimes {
  // Without an answer of the coordinator for so long, members go on alone.
  std::chrono::milliseconds coordinator{10'000};
  std::chrono::milliseconds remember{5000};  // members whose session has ended
  // A rank whose worker is gone, in its party.
  std::chrono::milliseconds discard{60'000};
  std::chrono::milliseconds progress{200};  // between reports of progress alone
};

// The members of broadcast rounds on this host (docs/internals/rounds.md): the sessions with a
// group. Turns the coordinator's orders, and the events of sessions and of the device process, into
// effects. Pure. Control thread only.
class HostRounds {
 public:
  using Origin = RoundMember::Origin;

  // `broadcasts`: otherwise the sessions take part in no round, and get their bytes by pulls and
  // uploads.
  explicit HostRounds(RoundEffects& effects, bool broadcasts = true, RoundTimes times = {})
      : effects_(effects), broadcasts_(broadcasts), times_(times) {}

  // --- sessions; those without a group are unknown here, and change nothing
  void attach(SessionId session, Origin origin);
  // The session gets this version. True: a round gathers for it, and may bring it.
  bool choose(SessionId session, const ModelVersion& id);
  // Just before the hand-over: whether the session waits for its party on its device.
  bool enters(SessionId session);
  // The session has all bytes of `id` from elsewhere. No round waits for it.
  void have_all(SessionId session, const ModelVersion& id);
  // After the hand-over. `alone`: why it gets no buckets of a round.
  void hand_over(SessionId session, const Digest& root, std::optional<std::string> alone);
  // Its contents, as DeviceJoined has them.
  void want(SessionId session, const Digest& contents, std::uint64_t payload_bytes,
            WantedPieces pieces);
  void commit(SessionId session);
  void report_phases(SessionId session, const rpc::PhaseTimes& phases, TimePoint now);
  void fail(SessionId session, const std::string& why, TimePoint now);
  void detach(SessionId session, TimePoint now);

  // --- the device process
  void joined(const device::DeviceJoined& joined, RoundMember::Bytes here);
  void progress(SessionId session, std::uint64_t bytes);
  void spread_over(const device::SpreadOver& over, TimePoint now);
  void device_over(const device::DeviceOver& over, TimePoint now);
  void meeting_id(std::uint64_t number, const Result<std::string>& id);

  // --- the coordinator
  proto::RoundReport report(const std::string& device_life, std::chrono::milliseconds wait,
                            TimePoint now);
  // The answer to report number `sequence`.
  void obey(const proto::RoundOrders& orders, std::uint64_t sequence, TimePoint now);
  void unanswered();
  void forget_orders();
  // Members do not hear of this version any more.
  void retired(const ModelVersion& id) { known_.retired(id); }
  // When there is something to report beside a question that waits; nullopt: nothing.
  std::optional<TimePoint> due() const;
  // Applies deadlines.
  void check(TimePoint now);

  bool has_members() const { return !members_.empty(); }
  bool is_member(SessionId session) const { return members_.contains(session); }
  const KnownRounds& known() const { return known_; }
  // The version that a session of a group, which has `have`, moves to.
  std::optional<std::uint64_t> news_for(SessionId session, const ModelVersion& have) const;
  // "joined", "spreading"; "" of a session that does not wait for its party.
  std::string_view phase_of(SessionId session) const;

 private:
  using PartyKey = std::pair<std::uint64_t, std::uint32_t>;  // round, party
  // An id that the device process makes for a party to meet by.
  struct Meeting {
    std::uint64_t number = 0;
    std::optional<Result<std::string>> id;
  };

  void go_alone(SessionId session, RoundMember& member, const std::string& why);
  // `more`: some of its bytes have yet to come from its host.
  void fill(SessionId session, RoundMember& member, bool more);
  void end_discarding(RoundMember& member, bool device_failed, TimePoint now);
  void obey_party(std::uint64_t round, const proto::PartyOrder& party, TimePoint now);
  void stop(SessionId session, RoundMember& member, const std::string& why, TimePoint now);
  void leave_ended_rounds(const std::string& why);
  void describe(proto::RoundReport& report);
  // The coordinator has answered a report that says the member's state.
  bool is_heard(const RoundMember& member) const;

  RoundEffects& effects_;
  const bool broadcasts_;
  const RoundTimes times_;
  KnownRounds known_;
  std::map<SessionId, RoundMember> members_;
  std::map<PartyKey, Meeting> meetings_;  // ids that were asked for
  // Contents that the coordinator may not know, with the report that describes them; 0: none.
  std::map<Digest, std::uint64_t> undescribed_;
  // Contents that an answered report has described.
  std::set<Digest> described_;
  std::uint64_t sequence_ = 0;  // of the last report
  std::uint64_t last_meeting_ = 0;
  bool changed_ = false;
  bool progressed_ = false;
  TimePoint reported_at_{};
};

}  // namespace rekindle::worker
