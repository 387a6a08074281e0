#pragma once

#include <cstdint>
#include <initializer_list>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "recovery/agent/agent_daemon.h"
#include "recovery/coordinator/coordinator.h"
#include "src/base/result.h"
#include "tools/cli/cli_session.h"
#include "tools/cli/command_line.h"

// The options of the daemons, and what their texts mean.
namespace rekindle::cli {

struct Problem {
  // The variable, or "FILE:LINE", that the value comes from; "" for the command line.
  std::string where;
  Error error;

  // Both in one line.
  Error in_line() const { return where.empty() ? error : error.with_context(where); }
};

// Collects everything that is wrong, so that a user sees it at once.
class Problems {
 public:
  void add(std::string where, Error error) { all_.push_back({std::move(where), std::move(error)}); }
  // Where the value of each option comes from, by long name.
  void set_places(std::map<std::string, std::string> places) { places_ = std::move(places); }
  // `outcome` is about the value of this option, and names it.
  void check(const std::string& option, Result<void> outcome) {
    if (!outcome) add(places_[option], std::move(outcome).error());
  }
  // Keeps `to` if there is no value.
  template <typename To, typename From>
  void take(const std::string& option, To& to, Result<From> from) {
    if (from) {
      to = std::move(*from);
    } else {
      add(places_[option], std::move(from).error());
    }
  }
  // The first of these options that has a place.
  std::string set_one_of(std::initializer_list<const char*> options);
  const std::vector<Problem>& all() const { return all_; }
  // Otherwise the first one, in one line.
  Result<void> none() const;

 private:
  std::map<std::string, std::string> places_;
  std::vector<Problem> all_;
};

struct CoordinatorArgs {
  std::string listen = "0.0.0.0:7300";
  std::string state;
  coordinator::etcd::EtcdOptions etcd;
  std::string etcd_ttl = "5s";
  std::string heartbeat = "250ms";
  std::string suspect_after = "750ms";
  std::string dead_after = "2s";
  std::size_t max_pullers = 8;
  std::uint32_t max_open_claims = 256;
  std::uint32_t replicas = 0;
  std::string recopy_rate = "256MiB";
  bool allow_drills = false;
  bool insecure = false;
  std::string metrics;
  std::string otlp;
  std::string http;
  std::string http_token_file;
  bool http_open = false;
  std::string rights;
  std::string audit;
  std::vector<std::string> trust;
};

struct AgentArgs {
  agent::AgentOptions options;
  std::string budget;
  std::string reserve = "0";
  std::string huge_pages = "auto";
  std::string max_rate;
  std::string load_timeout = "10min";
  std::string resident_ttl = "2min";
  bool external_keeper = false;
  std::string resident_scrub = "60s";
  std::string scrub = "24h";
  std::vector<std::string> allow_uids;
  std::vector<std::string> trust;
  std::string sign_key;
  std::string numa = "auto";
  std::string gpu = "auto";
  std::string gpu_bucket;
  std::string gpu_helpers = "auto";
  std::string gpu_wrapper;
  std::string keep_rate;
  bool verify_gpu = false;
  std::string gpu_direct = "off";
  bool insecure = false;
};

// `args` outlives the parser.
void add_coordinator_options(Command& command, CoordinatorArgs& args);
void add_agent_options(Command& command, AgentArgs& args);

// Reads the files that options name, as the daemon will. The result is meant for a daemon only if
// nothing was added to `problems`.
coordinator::CoordinatorOptions coordinator_options(const Settings& settings,
                                                    const CoordinatorArgs& args,
                                                    Problems& problems);
agent::AgentOptions agent_options(const Settings& settings, const AgentArgs& args,
                                  Problems& problems);

}  // namespace rekindle::cli
