#pragma once

#include <memory>
#include <string>

#include "recovery/worker/agent_host.h"
#include "recovery/worker/fleet_reporter.h"
#include "recovery/worker/local_instances.h"
#include "recovery/worker/round_driver.h"
#include "recovery/worker/served_session.h"
#include "recovery/worker/version_feed.h"
#include "src/async/notifier.h"

namespace rekindle::worker {

// What a session's serving leads to.
class ServingEffects {
 public:
  virtual ~ServingEffects() = default;
  virtual void serving_failed(const SessionPtr& session, const Error& why) = 0;
  // The worker has heard of more bytes: its word that it has loaded may be true now.
  virtual void bytes_announced(const SessionPtr& session) = 0;
};

// Serves one session after its attach: finds the version, hands over the files, and announces tiles
// as they verify. Control thread only.
class SessionServing {
 public:
  struct Parts {  // all outlive this
    CopyHost& copies;
    DeviceHost& devices;
    LocalInstances& instances;
    VersionFeeds& feeds;
    FleetReporter& fleet;
    RoundDriver& rounds;
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
  Result<void> hand_over(Session& session, VersionFeed& feed);
  Result<UniqueFd> give_device(Session& session, const VersionFeed::View& view, bool in_round,
                               std::string attached);
  void announce(const SessionPtr& session, const TileRuns& runs);

  const Parts parts_;
  ServingEffects& effects_;
  const bool verify_uploads_;
  async::Notifier changed_;
};

}  // namespace rekindle::worker
