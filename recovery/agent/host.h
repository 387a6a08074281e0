#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "src/base/digest.h"
#include "src/base/ids.h"
#include "src/base/result.h"

// What a command does on this host: through the agent that runs here, or, without one, through an
// agent inside the command's own process. Blocking, one call at a time; progress comes on the
// caller's thread.
namespace rekindle::agent {

struct HostOptions {
  std::filesystem::path store_directory = "/dev/shm/rekindle";
  std::uint64_t store_budget_bytes = 0;  // embedded only; 0: 90 % of the file system
  std::string coordinator;  // "host:port"; "" = none (publish stays local, pull needs --from)
  std::filesystem::path secret_file;  // cluster secret, mode 0600; "" = none
  std::chrono::milliseconds connect_timeout{3000};
};

struct PublishRequest {
  ModelVersion id;
  std::vector<std::filesystem::path> paths;  // files or one directory
  bool copy = false;  // do not adopt files that lie on the store's file system
};

struct PullRequest {
  ModelRef ref;
  std::string shard;          // "tp=3/8"; "" = whole
  std::string spec_json;      // contents of --spec; "" = built in, by the checkpoint's config.json
  std::string tensors_regex;  // instead of a shard
  std::vector<std::string> from;
  std::string transport;           // "", "tcp" or "shm"
  std::filesystem::path to;        // "" = into the store; else a complete checkpoint directory
  std::filesystem::path fallback;  // rung 4: a directory of safetensors files
};

struct SourceLine {
  std::string name;
  std::string transport;
  std::uint64_t bytes = 0;
  double bytes_per_second = 0;
  bool lost = false;
  std::string cause;
};

struct Progress {
  std::string phase;  // resolve, plan, connect, transfer, verify, commit, copy
  ModelVersion id;
  std::uint64_t bytes_done = 0;
  std::uint64_t bytes_total = 0;
  double bytes_per_second = 0;
  std::vector<SourceLine> sources;
  std::string note;  // one line worth showing, "" most of the time
};
using OnProgress = std::function<void(const Progress&)>;

struct Phase {
  std::string name;
  std::chrono::microseconds elapsed{0};
};

struct TransferSummary {
  ModelVersion id;
  Digest128 root;
  Digest128 layout;
  std::filesystem::path path;
  std::uint64_t bytes = 0;            // of tensors now held
  std::uint64_t fetched_bytes = 0;    // over the wire this time
  std::uint64_t resumed_bytes = 0;    // verified by an earlier try
  std::uint64_t refetched_bytes = 0;  // wrong or unfinished, fetched again
  std::uint32_t tensors = 0;
  std::chrono::milliseconds elapsed{0};
  std::vector<Phase> phases;
  std::vector<SourceLine> sources;
};

// pull --dry-run: the plan, nothing transferred.
struct PlanSummary {
  ModelVersion id;
  Digest128 root;
  std::uint32_t tensors = 0;
  std::uint64_t wanted_bytes = 0;
  std::uint64_t wire_bytes = 0;
  std::uint32_t slices = 0;
  std::uint32_t buckets = 0;
  struct PerSource {
    std::string name;
    std::string endpoint;
    std::uint64_t bytes_available = 0;  // of the plan
  };
  std::vector<PerSource> sources;
  struct Tensor {
    std::string name;
    std::string dtype;
    std::string shape;
    std::string box;
    std::uint64_t bytes = 0;
  };
  std::vector<Tensor> wanted;
  std::vector<std::string> missing;  // one line each
};

class Host {
 public:
  virtual ~Host() = default;
  virtual bool embedded() const = 0;
  virtual Result<TransferSummary> publish(const PublishRequest& request,
                                          const OnProgress& progress) = 0;
  virtual Result<TransferSummary> pull(const PullRequest& request, const OnProgress& progress) = 0;
  virtual Result<PlanSummary> plan(const PullRequest& request) = 0;
  virtual Result<std::uint64_t> retire(const ModelVersion& id) = 0;  // on this host; bytes freed
};

// Connects to the agent that owns `store_directory` (its socket is DIR/agent.sock); when there is
// none, embeds one. A pull `to` a directory always runs embedded and leaves the store alone.
Result<std::unique_ptr<Host>> open_host(const HostOptions& options);

// The `rekindle agent` daemon.
struct AgentOptions {
  std::string node_id;  // "" = host name
  std::filesystem::path store_directory = "/dev/shm/rekindle";
  std::uint64_t store_budget_bytes = 0;
  std::string listen = "0.0.0.0:7400";  // control; port 0 = any
  std::string data_listen;              // "" = same address, any port
  std::string advertise;  // host that others reach us by; "" = the listen address, else found out
  std::string coordinator;
  std::filesystem::path secret_file;
  std::string failure_domain;
  std::uint64_t max_bytes_per_second = 0;  // egress share; 0 = half of line rate where it is known
  std::size_t max_pullers = 64;
  // Called once when everything listens, with the addresses in use ("10.0.0.3:7400").
  std::function<void(const std::string& control, const std::string& data)> on_ready;
};
// Runs until SIGTERM or SIGINT (drains, then returns) or a fatal error.
Result<void> run_agent(const AgentOptions& options);

}  // namespace rekindle::agent
