#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "recovery/worker/core/worker_session.h"
#include "src/base/ids.h"
#include "src/base/result.h"

namespace rekindle::worker {

enum class InstanceState { kAbsent, kLoading, kCommitted, kUnfit };
std::string_view to_string(InstanceState state);

// An instance's name stands in file names and URLs: 1 to 128 bytes of [A-Za-z0-9._-], and the first
// is no dot.
Result<void> check_instance_name(std::string_view name);

// The ranks that serve one model replica. The instance is fit to serve while each rank has loaded
// every byte of the same version. Pure. A rank may live on another host; others_*() bring the
// coordinator's word on it.
class Instance {
 public:
  explicit Instance(std::string name) : name_(std::move(name)) {}

  struct Rank {
    std::uint32_t rank = 0;
    std::uint32_t world = 1;
    std::uint64_t generation = 0;
    std::string model;
  };
  // What follows from an event. If the instance is no longer committed, the caller first takes
  // "ready" back. Then it tells the sessions. If the instance is committed, it says "ready" last.
  struct Change {
    std::vector<SessionId> commit;                    // may serve: every rank has loaded
    std::vector<std::pair<SessionId, Error>> refuse;  // they wait for a rank that has failed
    std::vector<std::pair<SessionId, Error>> ended;   // they belong to the instance no more
  };

  // Replaces a rank that is here already, and ends its session. A higher generation replaces all
  // ranks. kStale: the generation is older. kInvalid: the rank contradicts the others.
  Result<Change> attach(const Rank& rank, SessionId session);

  // --- the version, which the first rank of a generation chooses for all
  enum class Choice { kGiven, kChoose, kWait };
  // kGiven: version() is known. kChoose: the caller resolves it, then calls chosen() or
  // choice_failed(). kWait: another session resolves it; ask again. kInvalid: the generation has
  // another version than `wanted`.
  Result<Choice> choose(SessionId session, std::optional<std::uint64_t> wanted);
  Result<void> chosen(SessionId session, const ModelVersion& id);
  void choice_failed(SessionId session);
  const std::optional<ModelVersion>& version() const { return version_; }

  // --- events of ranks. Sessions that were replaced change nothing.
  Change loaded(SessionId session);
  Change failed(SessionId session, std::string why);  // it died, hangs, or was ended
  Change left(SessionId session);                     // it detached
  // The coordinator's verdict, after a report of all ranks here. Loaded: every rank elsewhere has
  // loaded version(). Loading: a rank elsewhere has not, or attached anew. Failed: a rank elsewhere
  // failed ("rank 3 on b: the node died").
  Change others_loaded();
  Change others_loading();
  Change others_failed(std::string why);

  // The ranks that attached here, without those that were found elsewhere since.
  struct RankView {
    std::uint32_t rank = 0;
    SessionId session = 0;  // 0: it is not here
    bool loaded = false;
    bool left = false;
    std::string why;  // why it is not here
  };
  std::vector<RankView> ranks() const;

  InstanceState state() const;
  const std::string& name() const { return name_; }
  std::uint64_t generation() const { return generation_; }
  std::uint32_t world() const { return world_; }
  const std::string& model() const { return model_; }
  bool has_sessions() const;
  // Why it is not committed: "rank 1: died (SIGKILL)", "rank 2 has not attached"; "" when it is.
  std::string why() const;
  std::optional<std::uint32_t> unfit_rank() const;
  // Whether another rank than this one is attached, here or elsewhere.
  bool others_live(std::uint32_t rank) const;
  bool is_current(SessionId session) const { return rank_of(session).has_value(); }

 private:
  struct Slot {
    SessionId session = 0;  // 0: none here
    bool loaded = false;
    bool committed = false;  // was told that it may serve
    bool failed = false;     // and the instance has not committed since
    bool left = false;       // it detached
    std::string why;         // of the failure
  };
  std::optional<std::uint32_t> rank_of(SessionId session) const;
  bool all_loaded() const;
  void start_anew(const Rank& rank, Change& change);
  Change fail_rank(std::uint32_t rank, std::string why);
  Change commit_if_all_loaded();

  const std::string name_;
  std::uint64_t generation_ = 0;
  std::uint32_t world_ = 0;  // 0: nobody has ever attached
  std::string model_;
  std::map<std::uint32_t, Slot> slots_;  // ranks that attached here
  enum class Others { kUnknown, kLoading, kLoaded, kFailed };
  // The last verdict on the ranks elsewhere. Unknown again after any change here.
  Others others_ = Others::kUnknown;
  std::string others_why_;
  std::optional<ModelVersion> version_;
  SessionId choosing_ = 0;
};

}  // namespace rekindle::worker
