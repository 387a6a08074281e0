#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <sys/types.h>

#include "proto/common.pb.h"
#include "recovery/agent/rdma.h"
#include "recovery/device/gpu_options.h"
#include "recovery/pull/pull_types.h"
#include "src/base/digest.h"
#include "src/base/ids.h"
#include "src/base/result.h"
#include "src/store/numa.h"

// What a command does on this host: through the agent that runs here, or, without one, through an
// agent inside the command's own process. Blocking, one call at a time; progress comes on the
// caller's thread.
namespace rekindle::agent {

struct HostOptions {
  std::filesystem::path store_directory = "/dev/shm/rekindle";
  std::uint64_t store_budget_bytes = 0;  // embedded only; 0: 90 % of the file system
  std::string coordinator;  // "host:port"; "" = none (publish stays local, pull needs --from)
  std::filesystem::path secret_file;                 // cluster secret, mode 0600; "" = none
  RdmaOptions rdma{.enabled = false, .fabric = {}};  // embedded only; for pulls
  bool embedded_only = false;  // leave the agent of this host alone (pull --to DIR)
};

struct PublishRequest {
  ModelVersion id;
  std::vector<std::filesystem::path> paths;  // files or one directory
  std::optional<std::uint32_t> replicas;  // whole copies that the fleet keeps; nullopt: its default
};

using pull::OnProgress;
using pull::Phase;
using pull::PlanSummary;
using pull::Progress;
using pull::PullRequest;
using pull::SourceLine;
using pull::TransferSummary;

class Host {
 public:
  virtual ~Host() = default;
  virtual bool embedded() const = 0;
  virtual Result<TransferSummary> publish(const PublishRequest& request,
                                          const OnProgress& progress) = 0;
  // SIGINT and SIGTERM cancel it: kUnavailable, and what has verified is kept.
  virtual Result<TransferSummary> pull(const PullRequest& request, const OnProgress& progress) = 0;
  virtual int interrupted_by() const = 0;  // the signal that ended the last pull, 0 = none
  virtual Result<PlanSummary> plan(const PullRequest& request) = 0;
  virtual Result<std::uint64_t> retire(const ModelVersion& id) = 0;  // on this host; bytes freed
  // Reads all copies of the version on this host again and mends them; what came of it.
  virtual Result<std::vector<proto::CopyStatus>> verify(const ModelVersion& id) = 0;
};

// Connects to the agent that owns `store_directory` (its socket is DIR/agent/agent.sock); when
// there is none, embeds one. A pull `to` a directory needs embedded_only: it leaves the store
// alone.
Result<std::unique_ptr<Host>> open_host(const HostOptions& options);

// The `rekindle agent` daemon.
struct AgentOptions {
  std::string node_id;  // "" = host name
  std::filesystem::path store_directory = "/dev/shm/rekindle";
  std::uint64_t store_budget_bytes = 0;
  store::NumaPolicy numa;  // where copies lie
  std::chrono::milliseconds scrub{
      std::chrono::hours(24)};          // how often copies are read again; 0: never
  std::string listen = "0.0.0.0:7400";  // control; port 0 = any
  std::string data_listen;              // "" = same address, any port
  // Host that others reach us by; "" = the listen address, else the one used towards the
  // coordinator.
  std::string advertise;
  std::string
      data_advertise;  // "host:port" of the data port as others reach it (NAT, proxies); "" = as is
  std::string coordinator;
  std::filesystem::path secret_file;
  std::string failure_domain;
  std::uint64_t max_bytes_per_second = 0;  // that each puller may take; 0 = no cap
  std::size_t max_pullers = 64;
  RdmaOptions rdma;
  std::string health;                               // "host:port" of the HTTP endpoint; "" = none
  std::vector<uid_t> allowed_uids;                  // of workers, beside our own
  std::chrono::milliseconds load_timeout{600'000};  // of a worker, from its last byte's arrival
  device::GpuOptions gpu;                           // that workers get their weights on
  // Called once when everything listens, with the addresses in use ("10.0.0.3:7400").
  std::function<void(const std::string& control, const std::string& data,
                     const std::string& health)>
      on_ready;
};
// Runs until SIGTERM or SIGINT (drains, then returns) or a fatal error.
Result<void> run_agent(const AgentOptions& options);

}  // namespace rekindle::agent
