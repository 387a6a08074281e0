#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "recovery/worker/client.h"
#include "recovery/worker/core/worker_session.h"
#include "recovery/worker/event_log.h"
#include "recovery/worker/version_feed.h"
#include "recovery/worker/worker_wire.h"
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
  WorkerSession::CopyKnown known() const;
  const std::shared_ptr<const store::StoredVersion>& stored() const { return stored_; }

 private:
  std::shared_ptr<const store::StoredVersion> stored_;  // null: the copy is still arriving
  store::Verification::Stamps files_;
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
  ReadCopy copy;
  // Files that the worker may have mapped as long as it has not detached.
  VersionFeed::Files lent;
  std::optional<LoadedCall> loaded_call;
  WorkerLife worker = WorkerLife::kConnected;
};
using SessionPtr = std::shared_ptr<Session>;

void note(EventLog& events, const Session& session, std::string kind, std::string why = {});
// Notes the phase that the session has entered, once.
void note_phase(EventLog& events, Session& session);

}  // namespace rekindle::worker
