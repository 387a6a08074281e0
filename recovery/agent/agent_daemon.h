#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include <sys/types.h>

#include "recovery/agent/publisher_keys.h"
#include "recovery/agent/rdma.h"
#include "recovery/device/gpu_options.h"
#include "recovery/rpc/credentials.h"
#include "src/base/result.h"
#include "src/store/numa.h"

namespace rekindle::agent {

struct AgentOptions {
  // "": the host name.
  std::string node_id;
  std::filesystem::path store_directory = "/dev/shm/rekindle";
  std::uint64_t store_budget_bytes = 0;
  // Memory that is held ready for the next version, and at least as much as the largest one so far.
  // 0: none.
  std::uint64_t reserve_bytes = 0;
  // Whether a tmpfs with huge pages is mounted for the store where it has none. kRequired: or the
  // agent does not start.
  enum class HugePages { kAsItIs, kIfPossible, kRequired };
  HugePages huge_pages = HugePages::kAsItIs;
  // Where copies lie.
  store::NumaPolicy numa;
  // How often copies are read again; 0: never.
  std::chrono::milliseconds scrub{std::chrono::hours(24)};
  // The control port; port 0: any.
  std::string listen = "0.0.0.0:7400";
  // The data port. "": the address of `listen`, any port.
  std::string data_listen;
  // The congestion control of the TCP data streams, such as "cubic". "": the host's.
  std::string tcp_congestion;
  // Of the data streams of its own pulls.
  bool encrypt = false;
  // Other hosts read over encrypted data streams only. With either, RDMA is for trusted rails.
  bool require_encryption = false;
  // The host name by which others reach this agent. "": the one in `listen`, or else the address
  // that this host uses towards the coordinator.
  std::string advertise;
  // "host:port" of the data port as others reach it, behind NAT or a proxy. "": as it is.
  std::string data_advertise;
  std::string coordinator;
  rpc::CredentialOptions credentials;
  std::string failure_domain;
  // For each puller; 0: no cap.
  std::uint64_t max_bytes_per_second = 0;
  std::size_t max_pullers = 64;
  RdmaOptions rdma;
  // "host:port" of the HTTP endpoint. "": none.
  std::string health;
  // "host:port" where Prometheus scrapes. "": nowhere.
  std::string metrics;
  // Tokens of those who scrape; "": none.
  std::string http_token_file;
  // Whoever reaches the metrics may read them.
  bool http_open = false;
  // The URL of a collector that takes spans by OTLP/HTTP. "": none.
  std::string otlp;
  PublisherKeys publishers;
  // Users whose workers may attach, beside our own.
  std::vector<uid_t> allowed_uids;
  // For a worker to load, from the arrival of its last byte.
  std::chrono::milliseconds load_timeout{600'000};
  // How long parameters stay in GPU memory without a worker. 0: they never do.
  std::chrono::milliseconds resident_time_to_live{120'000};
  // Starts a keeper of resident copies where none runs.
  bool starts_keeper = true;
  std::chrono::milliseconds resident_scrub{60'000};
  // The GPUs on which workers get their weights.
  device::GpuOptions gpu;
  // The addresses in use ("10.0.0.3:7400"); "" for an endpoint that there is not.
  struct Listening {
    std::string control;
    std::string data;
    std::string health;
    std::string metrics;
  };
  // Commands may let this process or its workers fail on purpose.
  bool allow_drills = false;
  // A file or syslog, as for rpc::AuditLog, in which each privileged act leaves a line. "":
  // nowhere.
  std::string audit;
  // Called once when everything listens.
  std::function<void(const Listening&)> on_ready;
  // Reads the options again. Called at SIGHUP, on another thread. The agent takes the values that
  // can change while it runs: the limits of pullers, the interval of reading copies again, the time
  // to load, the secrets. Empty: SIGHUP ends the process.
  std::function<Result<AgentOptions>()> reread;
};

// The `rekindle agent` daemon. Runs until SIGTERM or SIGINT, or until a fatal error. After a signal
// it drains first.
Result<void> run_agent(const AgentOptions& options);

}  // namespace rekindle::agent
