#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>

#include "recovery/rpc/credentials.h"
#include "src/base/result.h"
#include "src/tensor/version_signature.h"

namespace rekindle::rpc {
class Rights;
}

namespace rekindle::coordinator {

namespace etcd {
struct EtcdOptions {
  // "https://10.0.0.1:2379,https://10.0.0.2:2379"; empty: no etcd.
  std::string urls;
  // PEM files for https: authorities ("": the system's), and an own certificate ("": none).
  std::string authorities, certificate, key;
  // "": etcd asks for none.
  std::string user, password_file;
  // Authenticates the records. "": whoever can write to etcd is believed.
  std::string state_key_file;
  // Believes records without authentication once more, and authenticates them.
  bool adopt_unsigned = false;
  // Of all keys; one per fleet.
  std::string prefix = "/rekindle/";
  // Another coordinator leads this long after the death of the leader.
  std::chrono::seconds ttl{5};
};
}  // namespace etcd

struct CoordinatorOptions {
  // Port 0: any.
  std::string listen = "0.0.0.0:7300";
  // Holds the durable state; locked. Not used with etcd.
  std::filesystem::path state_directory;
  // Holds the durable state of several coordinators, of which one leads.
  etcd::EtcdOptions etcd;
  rpc::CredentialOptions credentials;
  // "": everybody who may connect has all rights. A running coordinator keeps to its file.
  std::string rights_file;
  // What the file says; nullptr without one.
  std::shared_ptr<const rpc::Rights> rights = nullptr;
  // "syslog", or the file in which each change of the fleet leaves a line. "": nowhere.
  std::string audit;
  std::chrono::milliseconds heartbeat_interval{250};
  std::chrono::milliseconds suspect_after{750};
  std::chrono::milliseconds dead_after{2000};
  std::size_t max_pullers_per_source = 8;
  // Whole copies to keep of a version whose publisher gave no number.
  std::uint32_t replicas = 0;
  // Of one publisher: versions that have never been READY.
  std::uint32_t max_open_claims = 256;
  // For each copy that the coordinator orders; 0 is no cap.
  std::uint64_t recopy_bytes_per_second = std::uint64_t{256} << 20;
  // "host:port" where Prometheus scrapes. "": nowhere. Coordinators that stand by answer, too.
  std::string metrics;
  // The URL of a collector that takes spans by OTLP/HTTP. "": none.
  std::string otlp;
  // "host:port" of the status page for people. "": nowhere. Coordinators that stand by answer, too.
  std::string http;
  // Tokens of readers of both; "": none.
  std::string http_token_file;
  // Whoever reaches both may read.
  bool http_open = false;
  // Whose signature a version needs to become known.
  PublisherTrust trust;
  // Commands may kill this process on purpose.
  bool allow_drills = false;
  // The addresses in use; "": nowhere.
  struct Listening {
    std::string control;
    std::string metrics;
    std::string http;
  };
  // Called at the start of a term.
  std::function<void(const Listening& at)> on_ready;
  // Reads the options again. Called at SIGHUP, on another thread. The coordinator takes the limits
  // of pulls and copies from them, the secrets, and the rights. Empty: SIGHUP ends the process.
  std::function<Result<CoordinatorOptions>()> reread;
};

// kInvalid: suspicion and death do not follow the heartbeat in this order.
Result<void> check_timing(const CoordinatorOptions& options);

// The `rekindle coordinator` daemon: runs until SIGTERM or SIGINT, or a fatal error.
Result<void> run_coordinator(const CoordinatorOptions& options);

}  // namespace rekindle::coordinator
