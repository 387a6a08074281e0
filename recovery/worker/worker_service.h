#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <vector>

#include <sys/types.h>

#include <boost/asio/any_io_executor.hpp>

#include "proto/agent.pb.h"
#include "proto/worker.pb.h"
#include "recovery/trace/tracer.h"
#include "recovery/worker/agent_host.h"
#include "recovery/worker/event_log.h"
#include "recovery/worker/fleet_reporter.h"
#include "recovery/worker/local_instances.h"
#include "recovery/worker/model_switch.h"
#include "recovery/worker/order_desk.h"
#include "recovery/worker/publication_desk.h"
#include "recovery/worker/resident_scrub.h"
#include "recovery/worker/residents.h"
#include "recovery/worker/round_driver.h"
#include "recovery/worker/version_feed.h"
#include "recovery/worker/version_watch.h"
#include "recovery/worker/worker_connections.h"
#include "recovery/worker/worker_metrics.h"
#include "recovery/worker/worker_sessions.h"
#include "recovery/worker/worker_wire.h"
#include "src/async/task_group.h"

namespace rekindle::worker {

// Calls of workers that have the fleet's members of a group updated by a broadcast round. An update
// goes on even if its caller is gone. Control thread only.
class UpdateCalls {
 public:
  // Both outlive this.
  UpdateCalls(FleetHost& fleet, async::TaskGroup& tasks) : fleet_(fleet), tasks_(tasks) {}

  // kExhausted: the worker has too many calls under way.
  Result<void> begin(const std::shared_ptr<Client>& client, const proto::WorkerFrame& frame);

 private:
  async::Task<void> run(std::shared_ptr<Client> client, proto::WorkerFrame frame);
  async::Task<Result<proto::Updated>> update(std::shared_ptr<Client> client, UpdateOrder order,
                                             TimePoint give_up);

  FleetHost& fleet_;
  async::TaskGroup& tasks_;
  std::map<ClientId, std::size_t> under_way_;
};

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
  // Between devices of several hosts. They encrypt nothing.
  bool broadcasts = true;
  // Of a resident copy without a worker. 0: this agent keeps none.
  std::chrono::milliseconds resident_time_to_live{};
  // Starts a keeper of resident copies where none runs.
  bool starts_keeper = true;
  // How long a pass over all resident copies takes. 0: they are not read again.
  std::chrono::milliseconds resident_scrub{};
  // Outlives the service. nullptr: nobody asks for metrics.
  metrics::Metrics* metrics = nullptr;
  // Outlives the service. nullptr: recoveries leave no spans.
  trace::Tracer* tracer = nullptr;
};

// The agent's side of the workers' channel. It owns the parts, and routes calls of workers, events
// of the device process, and deadlines to them. Control thread only.
class WorkerService final : public device::DeviceEvents, private ConnectionEvents {
 public:
  static Result<std::unique_ptr<WorkerService>> start(Host& host,
                                                      boost::asio::any_io_executor executor,
                                                      ServiceOptions options);

  // Ends all sessions. Workers keep the files that they have mapped.
  async::Task<void> close(std::chrono::milliseconds deadline);
  // Waits for the sessions of a version that is about to be retired, then ends them.
  async::Task<void> before_retire(ModelVersion id) {
    return sessions_.before_retire(std::move(id));
  }

  const ReadyBoard& board() const { return instances_.board(); }
  void add_status(proto::AgentStatusResponse& status) const {
    sessions_.add_status(status);
    residents_.add_status(status);
  }
  Residents& residents() { return residents_; }
  const ResidentTotals& resident_totals() const { return residents_.totals(); }
  void set_resident_scrub(std::chrono::milliseconds every) { resident_scrub_.set_interval(every); }
  OrderDesk& orders() { return orders_; }
  async::Task<Result<proto::LocalSwitchResponse>> switch_model(proto::LocalSwitchRequest request);
  std::vector<SessionPtr> sessions_of(const std::string& instance) const {
    return sessions_.of_instance(instance);
  }
  // WorkerSessions::kill().
  Result<std::uint32_t> kill(const std::string& instance, std::uint32_t rank, bool dry_run) const {
    return sessions_.kill(instance, rank, dry_run);
  }
  // SessionTimes::load of sessions that begin from here on.
  void set_load_timeout(std::chrono::milliseconds load) { sessions_.set_load_timeout(load); }
  // Adds an event that belongs to no session.
  void note(Event event) { events_.add(std::move(event)); }
  // The events after `request.after`. Waits for one if there is none yet.
  async::Task<proto::AgentEventsResponse> events_after(proto::AgentEventsRequest request);
  // The same for the coordinator, at most `most`.
  std::vector<proto::FleetEvent> fleet_events(std::uint64_t after, std::size_t most) const;
  // Sessions that may still read this version.
  std::uint32_t readers_of(const ModelVersion& id) const { return sessions_.readers_of(id); }

  // --- DeviceEvents
  void device_over(const device::DeviceOver& over) override { sessions_.device_over(over); }
  void device_joined(const device::DeviceJoined& joined) override { rounds_.device_joined(joined); }
  void share_wanted(const device::ShareWanted& wanted) override { rounds_.share_wanted(wanted); }
  void spread_progress(std::uint64_t session, std::uint64_t bytes) override {
    rounds_.spread_progress(session, bytes);
  }
  void spread_over(const device::SpreadOver& over) override { rounds_.spread_over(over); }
  void meeting_id(std::uint64_t number, const Result<std::string>& id) override {
    rounds_.meeting_id(number, id);
  }
  void slots_offered(device::SlotsOffered offered) override {
    direct_.slots_offered(std::move(offered));
  }
  void bucket_wanted(const device::BucketWanted& wanted) override { direct_.bucket_wanted(wanted); }
  void reads_ended(const device::ReadsEnded& ended) override { direct_.reads_ended(ended); }

 private:
  WorkerService(Host& host, boost::asio::any_io_executor executor, ServiceOptions options,
                ReadyFiles files);
  void on_arrival() override;
  void on_call(const ClientPtr& client, proto::WorkerFrame frame,
               std::vector<UniqueFd> descriptors) override;
  void on_departure(const ClientPtr& client, const Departure& departure) override;
  Result<void> route(const ClientPtr& client, proto::WorkerFrame& frame,
                     std::vector<UniqueFd>& descriptors);
  async::Task<void> check_deadlines();

  Host& host_;
  const boost::asio::any_io_executor executor_;
  const ServiceOptions options_;
  async::TaskGroup tasks_;
  // nullptr: nobody asks for metrics.
  std::unique_ptr<WorkerMetrics> metrics_;
  EventLog events_;
  LocalInstances instances_;
  VersionFeeds feeds_;
  OrderDesk orders_;
  Residents residents_;
  ResidentScrub resident_scrub_;
  WorkerSessions sessions_;
  RoundDriver rounds_;
  DirectDriver direct_;
  FleetReporter fleet_;
  VersionWatch watch_;
  PublicationDesk publications_;
  UpdateCalls updates_;
  SessionId last_number_ = 0;  // of sessions and publications; numbers are never used again
  bool checking_ = false;
  std::unique_ptr<WorkerConnections> connections_;
};

}  // namespace rekindle::worker
