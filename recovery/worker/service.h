#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <sys/types.h>

#include <boost/asio/any_io_executor.hpp>

#include "proto/agent.pb.h"
#include "recovery/rpc/listener.h"
#include "recovery/worker/worker_client.h"
#include "recovery/worker/event_log.h"
#include "recovery/worker/host.h"
#include "recovery/worker/instances.h"
#include "recovery/worker/publication.h"
#include "recovery/worker/rounds.h"
#include "recovery/worker/supply.h"
#include "recovery/worker/wire.h"
#include "src/async/notifier.h"
#include "src/async/task_group.h"
#include "src/ipc/life.h"

namespace rekindle::worker {

struct ServiceOptions {
  std::filesystem::path directory;  // DIR/agent: worker.sock, ready/, publish/
  Incarnation incarnation;
  std::vector<uid_t> allowed_uids;  // beside our own; they may then pass through `directory`
  SessionTimes session_times;
  std::chrono::milliseconds ping_interval{1000};
  std::chrono::milliseconds silence{10'000};
  std::chrono::milliseconds retire_wait{5000};        // for workers to let go of a version
  std::chrono::milliseconds hear_ranks{5000};         // a new coordinator, of all ranks
  std::chrono::milliseconds forget_after{3'600'000};  // unfit instances without a rank
  bool verify_uploads = false;                        // on the device, by the device process
};

// The agent's side of the workers' channel: carries out what the state machines of core/ decide.
// Control thread only; one that hangs, floods or dies is nobody else's matter.
class WorkerService final : public device::DeviceEvents, private RoundEffects {
 public:
  static Result<std::unique_ptr<WorkerService>> start(Host& host,
                                                      boost::asio::any_io_executor executor,
                                                      ServiceOptions options);
  ~WorkerService() override;
  WorkerService(const WorkerService&) = delete;
  WorkerService& operator=(const WorkerService&) = delete;

  // Ends all sessions: what workers have mapped they keep.
  async::Task<void> close(std::chrono::milliseconds deadline);
  // Waits for the sessions of a version that is let go, then ends them.
  async::Task<void> before_retire(ModelVersion id);

  const ReadyBoard& board() const { return instances_.board(); }
  void add_status(proto::AgentStatusResponse& status) const;
  void note(Event event) { events_.add(std::move(event)); }  // of no session
  // Sessions that may still read this version.
  std::uint32_t readers_of(const ModelVersion& id) const;
  // --- what the device process says
  void device_over(const device::DeviceOver& over) override;
  void device_joined(const device::DeviceJoined& joined) override;
  void spread_progress(std::uint64_t session, std::uint64_t bytes) override;
  void spread_over(const device::SpreadOver& over) override;
  void meeting_id(std::uint64_t number, const Result<std::string>& id) override;
  // What came after event `request.after`, waiting for it when there is none yet.
  async::Task<proto::AgentEventsResponse> events_after(proto::AgentEventsRequest request);

 private:
  struct Session {
    Session(WorkerSession begun, std::shared_ptr<Client> of)
        : state(std::move(begun)), client(std::move(of)) {}
    WorkerSession state;
    std::shared_ptr<Client> client;
    std::string instance;  // its key
    std::uint32_t rank = 0;
    ModelVersion wanted;
    std::uint64_t attach_call = 0;
    std::string group;
    std::string device;  // that it wants buckets on
    std::uint64_t bucket_bytes = 0;
    bool on_device = false;  // the device process has it
    bool in_round = false;   // and had it wait for its party
    // A round brought every byte, and the device verified all of them: what becomes of this host's
    // copy does not matter to the worker.
    bool brought_by_round = false;
    std::shared_ptr<Supply> held;  // which fetches nothing as long as
    std::shared_ptr<const bool> hold;
    std::optional<proto::WorkerFrame> early_loaded;  // came before what makes it true
    bool attached = false;                           // the call was answered
    // That it loads from, and its files when it was handed over. Null: one that is still arriving.
    std::shared_ptr<const store::StoredVersion> copy;
    store::Verification::Stamps files;
    Supply::Files lent;            // that it may have mapped, while it has not detached
    std::optional<Error> held_up;  // why it was not yet, when something is in the way
    Phase told = Phase::kPlan;     // the events know of it
    struct Waiting {
      std::uint64_t call = 0;
      TimePoint deadline;
    };
    std::optional<Waiting> waiting;  // for the commit
  };
  using SessionPtr = std::shared_ptr<Session>;
  using ClientPtr = std::shared_ptr<Client>;
  struct Watcher {
    std::weak_ptr<Client> client;
    std::uint64_t call = 0;
    SessionId session = 0;
    ModelVersion have;
    TimePoint deadline;
  };

  WorkerService(Host& host, boost::asio::any_io_executor executor, ServiceOptions options,
                ReadyFiles files);
  Result<void> listen();

  // service.cc: connections
  void accept(rpc::Socket socket);
  async::Task<void> serve(ClientPtr client);
  void on_frame(const ClientPtr& client, proto::WorkerFrame frame);
  Result<void> begin_publish_call(const ClientPtr& client, const proto::WorkerFrame& frame);
  void greet(const ClientPtr& client, const proto::WorkerFrame& frame);
  Result<void> begin_call(const ClientPtr& client, const proto::WorkerFrame& frame);
  void on_death(const ipc::Death& death);
  void detected(const ClientPtr& client, Duration took);
  void drop(const ClientPtr& client, const Error& why, const char* kind = "failed");
  async::Task<void> sweep();
  void refuse(const ClientPtr& client, std::uint64_t call, SessionId session, const Error& error);

  // service_sessions.cc: sessions and their instances
  Result<void> begin_attach(const ClientPtr& client, const proto::WorkerFrame& frame);
  async::Task<void> attach(SessionPtr session, AttachOrder order);
  async::Task<Result<ModelVersion>> newest_for(SessionPtr session);
  async::Task<Result<ModelVersion>> choose_version(SessionPtr session, AttachOrder order);
  async::Task<Result<void>> follow(SessionPtr session, std::shared_ptr<Supply> supply);
  static void watch_copy(Session& session, const Supply::View& view);
  void take_supply(Session& session, const std::shared_ptr<Supply>& supply);
  Result<void> hand_over(Session& session, Supply& supply);
  void tell_ready(Session& session, const TileRuns& runs);
  Result<void> loaded(const ClientPtr& client, const proto::WorkerFrame& frame);
  Result<void> take_loaded(const SessionPtr& session, const proto::WorkerFrame& frame);
  async::Task<void> loaded_once_verified(SessionPtr session, proto::WorkerFrame frame);
  static bool is_loaded_early(const Session& session);
  static bool is_as_handed_over(const Session& session);
  Result<void> detach(const ClientPtr& client, const proto::WorkerFrame& frame);
  void fail_session(const SessionPtr& session, const Error& why, const char* kind = "failed");
  void note(const Session& session, std::string kind, std::string why = {});
  void note_phase(Session& session);
  void apply(Instances::Entry& entry, const Instance::Change& change);
  void end(const SessionPtr& session, const Error& why);
  void answer_waiting(Session& session, const Error& error);
  void time_out_waiting(Session& session, TimePoint now);
  Result<SessionPtr> session_of(const ClientPtr& client, const proto::WorkerFrame& frame) const;
  Instances::Entry* entry_of(const Session& session) const;

  // service_device.cc: the device process
  Result<UniqueFd> give_device(Session& session, const Supply::View& view, std::string attached);
  void leave_device(Session& session);

  // service_rounds.cc: broadcast rounds
  void spread(const device::SpreadOrder& order) override;
  void stop_spread(SessionId session, const std::string& why) override;
  void make_meeting_id(std::uint64_t number) override;
  bool begin_keeping(const device::SpreadOrder& order);
  void end_keeping(const device::SpreadOver& over);
  void left_round(SessionId session, bool all, const std::string& why) override;
  Rounds::Origin origin_of(const Session& session, const Instances::Entry& entry) const;
  void loaded_early(Session& session, const proto::WorkerFrame& frame);
  void retry_loaded(Session& session);
  void rounds_changed();
  async::Task<void> report_rounds();
  async::Task<void> ask_for_orders(bool wait);
  async::Task<void> update(ClientPtr client, proto::WorkerFrame frame);
  async::Task<Result<proto::Updated>> update_and_wait(ClientPtr client, UpdateOrder order,
                                                      TimePoint give_up);

  // service_fleet.cc: instances whose ranks live on several hosts
  bool spans(const Instances::Entry& entry) const;
  void ranks_changed(Instances::Entry& entry);
  RankWord word_of(const Instances::Entry& entry, const Instance::RankView& rank);
  async::Task<void> report_ranks();
  async::Task<void> report_instance(std::string name);
  async::Task<void> report_once(RankWord word);
  bool has_heard_all(Instances::Entry& entry, std::uint64_t term) const;
  using Refusals = std::map<std::uint32_t, Error>;  // by rank
  // `last`: the coordinator's answer of the ranks that it did not refuse; none: it refused all.
  void obey(const std::string& name, std::uint64_t changes, const Refusals& refused,
            const std::optional<Result<FleetWord>>& last);

  // service_publish.cc: versions that workers watch and make
  void watch(const ClientPtr& client, const proto::WorkerFrame& frame);
  void forget_watch(SessionId session);
  async::Task<void> watch_versions();
  using Newest = std::map<std::string, ModelVersion>;  // by model
  void answer_watchers(const Newest& newest);
  async::Task<void> begin_publish(ClientPtr client, proto::WorkerFrame frame);
  async::Task<void> commit_publish(ClientPtr client, std::uint64_t call, SessionId session);
  async::Task<void> abandon_publish(ClientPtr client, std::uint64_t call, SessionId session);
  async::Task<void> discard(std::unique_ptr<Publication> publication);
  Result<std::unique_ptr<Publication>> take_publication(const ClientPtr& client, SessionId session);

  Host& host_;
  const boost::asio::any_io_executor executor_;
  const ServiceOptions options_;
  EventLog events_;
  Instances instances_;
  Supplies supplies_;
  std::map<ClientId, ClientPtr> clients_;
  std::map<SessionId, SessionPtr> sessions_;  // that have not ended
  struct Keeper {
    std::shared_ptr<Supply> supply;
    Lease writing;
    std::string party;
  };
  std::map<SessionId, Keeper> keepers_;  // until their spread is over
  struct Publishing {
    ClientId client = 0;
    std::unique_ptr<Publication> publication;
  };
  std::map<SessionId, Publishing> publications_;
  std::vector<Watcher> watchers_;
  bool watching_ = false;
  bool sweeping_ = false;
  bool reporting_ = false;
  Rounds rounds_;
  bool reporting_rounds_ = false;
  bool polling_rounds_ = false;  // an answer is waited for that comes when there are orders,
  bool asking_rounds_ = false;   // and one that comes at once
  TimePoint ask_rounds_after_{};
  bool ranks_changed_ = false;
  std::uint64_t last_report_ = 0;
  std::uint64_t last_change_ = 0;  // of any instance's ranks
  bool closing_ = false;
  std::uint64_t last_number_ = 0;  // of clients, sessions and publications; never used again
  async::Notifier changed_;        // a session has ended, or an instance has its version
  async::Notifier news_;           // for the coordinator
  async::Notifier round_news_;     // likewise
  std::shared_ptr<rpc::Listener> listener_;
  async::TaskGroup tasks_;
  std::unique_ptr<ipc::LifeWatch> watch_;  // last: its thread posts to us
};

}  // namespace rekindle::worker
