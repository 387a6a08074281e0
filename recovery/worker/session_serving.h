#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "proto/resident.pb.h"
#include "recovery/worker/agent_host.h"
#include "recovery/worker/core/worker_session.h"
#include "recovery/worker/direct_driver.h"
#include "recovery/worker/event_log.h"
#include "recovery/worker/fleet_reporter.h"
#include "recovery/worker/local_instances.h"
#include "recovery/worker/round_driver.h"
#include "recovery/worker/version_feed.h"
#include "recovery/worker/worker_connections.h"
#include "recovery/worker/worker_wire.h"
#include "src/async/task.h"
#include "src/store/segment_store.h"

namespace rekindle::worker {

// The copy that a worker reads, with its files as they were when the worker got them.
class ReadCopy {
 public:
  // The copy was in the store at the hand-over.
  void hand_over(std::shared_ptr<const store::StoredVersion> stored);
  // The copy was committed while the worker read it. Its files are those recorded at the commit;
  // without a record the copy never counts as unchanged.
  void commit(std::shared_ptr<const store::StoredVersion> stored);
  // The worker got a resident copy, all of which was checked.
  void hand_over_resident() { resident_ = true; }
  WorkerSession::CopyKnown known() const;
  const std::shared_ptr<const store::StoredVersion>& stored() const { return stored_; }

 private:
  std::shared_ptr<const store::StoredVersion> stored_;  // null: the copy is still arriving
  store::Verification::Stamps files_;
  bool resident_ = false;
};

// One session with everything that carries it out. WorkerSession has its rules.
struct Session {
  enum class WorkerLife { kConnected, kGone, kDead };
  // A call that says that the worker has loaded. It is answered when the instance commits.
  struct LoadedCall {
    enum class Stage { kBytes, kVerification, kInstance };
    std::uint64_t call = 0;
    std::uint64_t bytes = 0;
    std::chrono::milliseconds patience{};   // for the instance; 0: none
    TimePoint deadline = TimePoint::max();  // once it waits for the instance
    Stage stage = Stage::kBytes;            // what it waits for
  };

  Session(WorkerSession begun, std::shared_ptr<Client> of, AttachOrder ordered)
      : state(std::move(begun)), client(std::move(of)), order(std::move(ordered)) {}
  SessionId id() const { return state.id(); }
  std::uint32_t rank() const { return order.rank.rank; }
  // Version 0: it is not chosen yet.
  const ModelVersion& wanted() const { return order.wanted.id; }

  WorkerSession state;
  const std::shared_ptr<Client> client;
  AttachOrder order;
  std::string instance;           // its key in LocalInstances
  std::uint64_t attach_call = 0;  // 0: it was answered
  bool with_device = false;       // the device process fills its buckets
  // NICs bring its buckets, if its copy is not here. Null: they do not.
  std::shared_ptr<pull::DirectReads> direct;
  ReadCopy copy;
  // Files that the worker may have mapped as long as it has not detached.
  VersionFeed::Files lent;
  std::optional<LoadedCall> loaded_call;
  // The name of the worker's copy in Residents; "": none.
  std::string resident;
  const TimePoint attached_at = steady_now();
  std::optional<TimePoint> committed;
  WorkerLife worker = WorkerLife::kConnected;
  AttachTrace trace;
};
using SessionPtr = std::shared_ptr<Session>;

void note(EventLog& events, const Session& session, std::string kind, std::string why = {});
// Notes the phase that the session has entered, once.
void note_phase(EventLog& events, Session& session);

// What a session's serving leads to.
class ServingEffects {
 public:
  virtual ~ServingEffects() = default;
  virtual void serving_failed(const SessionPtr& session, const Error& why) = 0;
  // A session that attached apart from its instance has its bytes. kInvalid, kStale: the instance
  // does not take it.
  virtual Result<void> take_rank(const SessionPtr& session) = 0;
  // The worker has heard of more bytes: its word that it has loaded may be true now.
  virtual void bytes_announced(const SessionPtr& session) = 0;
};

// Serves one session after its attach: finds the version, hands over the files, and announces tiles
// as they verify. Control thread only.
class Residents;
class SessionServing {
 public:
  struct Parts {  // all outlive this
    CopyHost& copies;
    DeviceHost& devices;
    LocalInstances& instances;
    VersionFeeds& feeds;
    FleetReporter& fleet;
    RoundDriver& rounds;
    DirectDriver& direct;
    Residents& residents;
    EventLog& events;
  };
  // `verify_uploads`: the device process compares what it uploads with the version's digests.
  SessionServing(Parts parts, ServingEffects& effects, boost::asio::any_io_executor executor,
                 bool verify_uploads);

  // Returns when the worker has heard of every tile, or the session has ended.
  async::Task<void> serve(SessionPtr session);
  // The device process shall forget the session, if it has it.
  void leave_device(Session& session);
  // A session has ended, or an instance has its version.
  async::Notifier& changed() { return changed_; }

 private:
  async::Task<Result<ModelVersion>> choose_version(SessionPtr session);
  async::Task<Result<ModelVersion>> newest_for(SessionPtr session);
  async::Task<Result<void>> follow(SessionPtr session, std::shared_ptr<VersionFeed> feed);
  async::Task<Result<void>> find_bytes(SessionPtr session, ModelVersion id);
  Result<void> hand_over(Session& session, VersionFeed& feed);
  Result<void> hand_over_resident(const SessionPtr& session, proto::ResidentRecord record,
                                  std::vector<UniqueFd> blocks);
  void choose_direct(Session& session, VersionFeed& feed);
  // How the device process gets the bytes of a session.
  enum class DeviceWay { kUpload, kRound, kDirect };
  Result<UniqueFd> give_device(Session& session, const VersionFeed::View& view, DeviceWay way,
                               std::string attached);
  void announce(const SessionPtr& session, const TileRuns& runs);

  const Parts parts_;
  ServingEffects& effects_;
  const bool verify_uploads_;
  async::Notifier changed_;
};

}  // namespace rekindle::worker
