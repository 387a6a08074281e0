#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "recovery/agent/rdma.h"
#include "recovery/pull/pull_types.h"
#include "recovery/rpc/credentials.h"
#include "recovery/trace/tracer.h"
#include "src/base/ids.h"
#include "src/base/result.h"
#include "src/tensor/version_signature.h"

namespace rekindle::proto {
class CopyStatus;
class LocalSwitchRequest;
class LocalSwitchResponse;
}  // namespace rekindle::proto

namespace rekindle::agent {

struct LocalAgentOptions {
  std::filesystem::path store_directory = "/dev/shm/rekindle";
  // Embedded only. 0: 90 % of the file system.
  std::uint64_t store_budget_bytes = 0;
  // "host:port". "": none; a publication stays local, and a pull needs --from.
  std::string coordinator;
  rpc::CredentialOptions credentials;
  // Embedded only; for pulls.
  RdmaOptions rdma{.enabled = false, .fabric = {}};
  // Embedded only: as CoreOptions::encrypt.
  bool encrypt = false;
  // Leaves the agent of this host alone (pull --to DIR).
  bool embedded_only = false;
  // Embedded only. Outlives the LocalAgent. nullptr: operations leave no spans.
  trace::Tracer* tracer = nullptr;
};

struct PublishRequest {
  ModelVersion id;
  // Files, or one directory.
  std::vector<std::filesystem::path> paths;
  // Whole copies that the fleet keeps. nullopt: its default.
  std::optional<std::uint32_t> replicas;
  // Of the root that the files have (store::root_of_files). They must be valid.
  std::vector<VersionSignature> signatures = {};
  // The span that the publication belongs to.
  trace::Context trace = {};
};

using pull::OnProgress;
using pull::Phase;
using pull::PlanSummary;
using pull::Progress;
using pull::PullRequest;
using pull::SourceLine;
using pull::TransferSummary;

// The agent that performs a command on this host: the one that runs here, or else one inside the
// process of the command. Blocking, one call at a time; progress comes on the thread of the caller.
class LocalAgent {
 public:
  virtual ~LocalAgent() = default;
  virtual bool embedded() const = 0;
  virtual Result<TransferSummary> publish(const PublishRequest& request,
                                          const OnProgress& progress) = 0;
  // SIGINT and SIGTERM cancel it: kUnavailable, and verified bytes are kept.
  virtual Result<TransferSummary> pull(const PullRequest& request, const OnProgress& progress) = 0;
  // The signal that ended the last pull, or 0.
  virtual int interrupted_by() const = 0;
  virtual Result<PlanSummary> plan(const PullRequest& request) = 0;
  // On this host. Returns the bytes that became free.
  virtual Result<std::uint64_t> retire(const ModelVersion& id) = 0;
  // Reads all copies of the version on this host again, and mends them. Returns their states.
  virtual Result<std::vector<proto::CopyStatus>> verify(const ModelVersion& id) = 0;
  // Gives resident copies back: of a model or one of its versions (nullopt: all), on one device
  // ("": all). Returns their number. kUnavailable: no agent runs here.
  virtual Result<std::uint64_t> release(const std::optional<ModelRef>& what,
                                        const std::string& device) = 0;
  // Has the workers of an instance on this host serve another version. kUnavailable: no agent runs
  // here. Other errors: worker::switch_model().
  virtual Result<proto::LocalSwitchResponse> switch_model(proto::LocalSwitchRequest request) = 0;
};

// Connects to the agent that owns `store_directory`. When there is none, embeds one. A pull `to` a
// directory needs embedded_only, because it leaves the store alone.
Result<std::unique_ptr<LocalAgent>> open_local_agent(const LocalAgentOptions& options);

// The unix socket of the agent that owns a store: DIR/agent/agent.sock.
std::filesystem::path agent_socket(const std::filesystem::path& store_directory);

}  // namespace rekindle::agent
