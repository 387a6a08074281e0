#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "proto/agent.pb.h"
#include "recovery/worker/order_desk.h"
#include "recovery/worker/residents.h"
#include "recovery/worker/session_serving.h"
#include "recovery/worker/version_watch.h"
#include "recovery/worker/worker_connections.h"

namespace rekindle::worker {

// The sessions of all workers, from their attach to their end: answers their calls, and carries out
// what instances, rounds and the coordinator decide for them. Control thread only.
class WorkerSessions final : public RankEffects,
                             public RoundSessions,
                             public DirectSessions,
                             public ResidentOwners,
                             private ServingEffects {
 public:
  struct Options {
    SessionTimes times;
    std::chrono::milliseconds retire_wait{5000};  // for workers to let go of a version
    bool verify_uploads = false;                  // on the device, by the device process
  };
  // `parts`, `watch`, `orders` and `tasks` outlive this.
  WorkerSessions(SessionServing::Parts parts, VersionWatch& watch, OrderDesk& orders,
                 async::TaskGroup& tasks, boost::asio::any_io_executor executor, Options options);

  // Kills the worker of this rank and returns its pid; with `dry_run` it only finds it. kNotFound:
  // the rank has no session.
  Result<std::uint32_t> kill(const std::string& instance, std::uint32_t rank, bool dry_run) const;
  // SessionTimes::load of sessions that begin from here on.
  void set_load_timeout(std::chrono::milliseconds load) { options_.times.load = load; }

  // --- calls of workers
  // `id`: of the new session, never used before.
  Result<void> attach(const ClientPtr& client, const proto::WorkerFrame& frame, SessionId id);
  // A staged session takes its rank of the instance. Of another one it changes nothing.
  Result<void> begin_switch(const ClientPtr& client, const proto::WorkerFrame& frame);
  Result<void> report_phases(const ClientPtr& client, const proto::WorkerFrame& frame);
  Result<void> loaded(const ClientPtr& client, const proto::WorkerFrame& frame);
  // Answered when the copy is kept, or not.
  Result<void> seal_resident(const ClientPtr& client, proto::WorkerFrame frame,
                             std::vector<UniqueFd> blocks);
  // Answered when the worker's resident copy is right, or cannot be made so.
  Result<void> mend_resident(const ClientPtr& client, const proto::WorkerFrame& frame);
  Result<void> detach(const ClientPtr& client, const proto::WorkerFrame& frame);
  // kStale: the client has no such session.
  Result<SessionPtr> find(const ClientPtr& client, const proto::WorkerFrame& frame) const;

  // The sessions of an instance on this host, by rank.
  std::vector<SessionPtr> of_instance(const std::string& instance) const;

  void client_gone(const ClientPtr& client, const Departure& departure);
  void device_over(const device::DeviceOver& over);
  // Ends the sessions whose deadline has passed, and answers calls whose time is up.
  void check(TimePoint now);
  // This process did not run for so long.
  void excuse(Duration pause);

  // Waits for the sessions of a version that is about to be retired, then ends them.
  async::Task<void> before_retire(ModelVersion id);
  // Sessions that may still read this version.
  std::uint32_t readers_of(const ModelVersion& id) const;
  void add_status(proto::AgentStatusResponse& status) const;

  // --- RankEffects
  void fail_rank(SessionId session, const Error& why) override;
  void apply(LocalInstances::Entry& entry, const Instance::Change& change) override;
  // --- ResidentOwners
  async::Task<Result<void>> order_mend(SessionId session, std::vector<std::string> tensors,
                                       TimePoint give_up) override;
  void resident_is_wrong(SessionId session, const Error& why) override;
  // --- RoundSessions
  bool has_complete_copy(SessionId session) const override;
  void note_round_event(SessionId session, const char* kind) override;
  void receive_broadcast(SessionId session) override;
  void leave_round(SessionId session, bool all, const std::string& why) override;
  // --- DirectSessions
  void left_direct(SessionId session, bool all, const std::string& why) override;

 private:
  void serving_failed(const SessionPtr& session, const Error& why) override;
  void bytes_announced(const SessionPtr& session) override;

  SessionPtr find(SessionId session) const;
  Result<void> take_rank(const SessionPtr& session) override;
  static HostRounds::Origin origin_of(const Session& session);
  async::Task<void> seal(SessionPtr session, proto::WorkerFrame frame,
                         std::vector<UniqueFd> blocks);
  async::Task<void> mend(SessionPtr session, std::uint64_t call);
  void follow_ranks(AttachOrder& order) const;
  void find_predecessor(Session& session, LocalInstances::Entry& entry);
  void proceed_loaded(const SessionPtr& session);
  async::Task<void> verify_loaded(SessionPtr session);
  void accept_loaded(Session& session);
  static void refuse_loaded(Session& session, const Error& why);
  // The rank is not fit any more. The other ranks keep what they have.
  void fail_session(const SessionPtr& session, const Error& why, const char* kind = "failed");
  void end(const SessionPtr& session, const Error& why);

  const SessionServing::Parts parts_;
  VersionWatch& watch_;
  OrderDesk& orders_;
  async::TaskGroup& tasks_;
  Options options_;
  SessionServing serving_;
  std::map<SessionId, SessionPtr> sessions_;  // that have not ended
};

}  // namespace rekindle::worker
