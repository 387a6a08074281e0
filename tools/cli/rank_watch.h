#pragma once

#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <poll.h>
#include <sys/types.h>

#include "proto/agent.pb.h"
#include "src/base/result.h"
#include "src/base/unique_fd.h"
#include "tools/cli/process_tree.h"
#include "tools/cli/remote.h"

namespace rekindle::cli {

// The ranks that a supervised command has.
struct RankPlace {
  // "": the ranks belong to no instance.
  std::string instance;
  std::uint32_t rank = 0;
  // 1: all ranks of the instance.
  std::uint32_t world = 1;
};

// Notices the death of ranks that a supervised process has started: processes below it that have
// attached to the agent. The events of the agent tell which these are. A pidfd for each shows its
// end, also while the agent is down. A rank that has detached from all its sessions may end. A
// thread asks the agent; all methods belong to the thread of the supervisor.
class RankWatch {
 public:
  static Result<std::unique_ptr<RankWatch>> create(const Settings& settings, RankPlace place);
  ~RankWatch();
  RankWatch(const RankWatch&) = delete;
  RankWatch& operator=(const RankWatch&) = delete;

  // Begins to ask the agent. Later calls do nothing.
  Result<void> start();
  // Before a worker starts: learns what the agent already tells, which cannot concern the worker.
  // Waits a short time for the agent.
  void begin();
  // From now on the ranks are those below `process`. Forgets the others, and the death.
  void follow(pid_t process);
  // Adds what to poll for.
  void watch(std::vector<pollfd>& entries) const;
  // Learns from the agent and from the pidfds.
  void look();
  // The same, with all that the agent knows by now. Waits a short time for its answer.
  void look_again();
  // The first rank that has died: "rank 0 (pid 17)". "": none.
  const std::string& death() const { return death_; }
  // Passes on the processes of the ranks that it has not seen die.
  std::vector<HeldProcess> take_survivors();

 private:
  struct Rank {
    HeldProcess process;
    std::uint32_t rank = 0;
    // Those of a former life of the agent are not in it.
    std::set<std::uint64_t> sessions;
  };
  // Of any process of this host.
  struct Attached {
    pid_t pid = 0;
    std::uint32_t rank = 0;
    // Of `place_`, and not from before begin().
    bool ours = false;
  };
  struct News {
    proto::AgentEventsResponse response;
    // Some of it may be from before begin().
    bool history = false;
  };
  RankWatch(std::unique_ptr<Remote> agent, RankPlace place)
      : place_(std::move(place)), agent_(std::move(agent)) {}
  void ask_agent();
  Result<proto::AgentEventsResponse> next_events(std::uint32_t wait_ms);
  // Returns after an answer that was asked for by now, a failure, or a short time.
  void catch_up();
  void take_news();
  void take(const proto::AgentEvent& event, bool history);
  void attach(std::uint64_t session, const Attached& attached);
  void ended(std::uint64_t session, const std::string& kind);
  void died(std::uint32_t rank, pid_t pid);
  bool is_ours(const proto::AgentEvent& event) const;
  bool agent_is_visible() const;

  const RankPlace place_;
  UniqueFd woken_;

  // Of the thread.
  const std::unique_ptr<Remote> agent_;
  std::string asked_incarnation_;
  std::uint64_t after_ = 0;

  pid_t followed_ = 0;
  std::string death_;
  std::string incarnation_;
  // The numbers in its events are those of processes here.
  bool visible_ = false;
  std::map<std::uint64_t, Attached> attached_;
  std::vector<Rank> ranks_;

  // For everything below.
  std::mutex mutex_;
  std::condition_variable changed_;
  bool stopping_ = false;
  std::uint64_t asked_ = 0;
  std::uint64_t answered_ = 0;
  // The question of begin(), and the newest one to which the agent itself gave an answer.
  std::uint64_t begun_ = 0;
  std::uint64_t learned_ = 0;
  std::vector<News> news_;

  std::thread thread_;
};

}  // namespace rekindle::cli
