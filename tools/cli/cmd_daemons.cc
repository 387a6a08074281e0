#include <algorithm>
#include <cctype>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <memory>
#include <sstream>
#include <string>

#include <fcntl.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "recovery/agent/agent_daemon.h"
#include "recovery/coordinator/coordinator.h"
#include "recovery/device/device_child.h"
#include "recovery/device/gpu_options.h"
#include "recovery/device/process/device_process.h"
#include "recovery/rpc/address.h"
#include "src/base/log.h"
#include "src/base/units.h"
#include "src/bucket/bucket_plan.h"
#include "src/store/numa.h"
#include "tools/cli/arguments.h"
#include "tools/cli/cli_session.h"
#include "tools/cli/command_line.h"
#include "tools/cli/output.h"
#include "transport/tcp/tcp_transport.h"

namespace rekindle::cli {
namespace {

// The first lines that a daemon prints, for people and for scripts that wait for them.
void announce(const Settings& settings, const char* what,
              const agent::AgentOptions::Listening& at) {
  struct Line {
    const char* key;
    const char* does;
    const std::string& address;
  };
  const Line lines[] = {{"listen", "listening", at.control},
                        {"data", "serving data", at.data},
                        {"health", "answering health", at.health},
                        {"metrics", "answering metrics", at.metrics}};
  Json json = {{"event", "ready"}, {"role", what}};
  for (const Line& line : lines) {
    if (line.address.empty()) continue;
    if (settings.json) {
      json[line.key] = line.address;
    } else {
      print_line(fmt::format("{} {} on {}", what, line.does, line.address));
    }
  }
  if (settings.json) print_line(json.dump());
  (void)flush_output();
}

struct CoordinatorArgs {
  std::string listen = "0.0.0.0:7300";
  std::string state;
  coordinator::etcd::EtcdOptions etcd;
  std::string etcd_ttl = "5s";
  std::string heartbeat = "250ms";
  std::string suspect_after = "750ms";
  std::string dead_after = "2s";
  std::size_t max_pullers = 8;
  std::uint32_t replicas = 0;
  std::string recopy_rate = "256MiB";
  std::string metrics;
  std::string otlp;
};

constexpr std::size_t kMostPullers = 65536;

Result<void> check_max_pullers(std::size_t count) {
  if (count >= 1 && count <= kMostPullers) return {};
  return fail(ErrorCode::kInvalid, "--max-pullers: 1 to {} are possible", kMostPullers);
}

Result<coordinator::etcd::EtcdOptions> etcd_options(const CoordinatorArgs& args) {
  coordinator::etcd::EtcdOptions options = args.etcd;
  TRY(const auto ttl, parse_duration("--etcd-ttl", args.etcd_ttl));
  options.ttl = std::chrono::duration_cast<std::chrono::seconds>(ttl);
  if (options.ttl != ttl || options.ttl < std::chrono::seconds(2)) {
    return fail(ErrorCode::kInvalid, "--etcd-ttl {}: whole seconds, 2 at least", args.etcd_ttl);
  }
  if (!options.urls.empty() && !args.state.empty()) {
    return fail(ErrorCode::kInvalid, "--state and --etcd: the state lies in one of them, not both");
  }
  return options;
}

Result<int> run_coordinator_command(const Settings& settings, const CoordinatorArgs& args) {
  coordinator::CoordinatorOptions options;
  TRY_VOID(check_address("--listen", args.listen));
  if (!args.metrics.empty()) TRY_VOID(check_address("--metrics", args.metrics));
  TRY_VOID(check_max_pullers(args.max_pullers));
  options.listen = args.listen;
  options.state_directory =
      args.state.empty() ? default_state_directory() : std::filesystem::path(args.state);
  options.secret_file = settings.secret_file;
  TRY(options.etcd, etcd_options(args));
  TRY(options.heartbeat_interval, parse_duration("--heartbeat", args.heartbeat));
  TRY(options.suspect_after, parse_duration("--suspect-after", args.suspect_after));
  TRY(options.dead_after, parse_duration("--dead-after", args.dead_after));
  if (options.heartbeat_interval.count() == 0 ||
      options.suspect_after <= options.heartbeat_interval ||
      options.dead_after <= options.suspect_after) {
    return fail(ErrorCode::kInvalid, "need 0 < --heartbeat < --suspect-after < --dead-after");
  }
  options.max_pullers_per_source = args.max_pullers;
  options.replicas = args.replicas;
  TRY(options.recopy_bytes_per_second, parse_size("--recopy-rate", args.recopy_rate));
  options.metrics = args.metrics;
  options.otlp = args.otlp;
  options.on_ready = [settings](const std::string& address, const std::string& metrics) {
    announce(settings, "coordinator", {address, "", "", metrics});
  };
  TRY_VOID(coordinator::run_coordinator(options));
  return kExitOk;
}

struct AgentArgs {
  agent::AgentOptions options;
  std::string budget;
  std::string reserve = "0";
  std::string huge_pages = "auto";
  std::string max_rate;
  std::string load_timeout = "10min";
  std::string scrub = "24h";
  std::vector<std::string> allow_uids;
  std::string numa = "auto";
  std::string gpu = "auto";
  std::string gpu_bucket;
  std::string gpu_wrapper;
  std::string keep_rate;
  bool verify_gpu = false;
  std::string gpu_direct = "off";
};

Result<device::GpuOptions> gpu_options(const Settings& settings, const AgentArgs& args) {
  auto options = device::parse_gpu(args.gpu);
  if (!options) return fail(std::move(options).error().with_context("--gpu"));
  if (!args.gpu_bucket.empty()) {
    TRY(options->bucket_bytes, parse_size("--gpu-bucket", args.gpu_bucket));
    if (options->bucket_bytes < kMiB || options->bucket_bytes > bucket::kLargestBucket) {
      return fail(ErrorCode::kInvalid, "--gpu-bucket {}: 1MiB to {} are possible", args.gpu_bucket,
                  format_bytes(bucket::kLargestBucket));
    }
  }
  if (!args.keep_rate.empty()) {
    TRY(options->keep_bytes_per_second, parse_size("--keep-rate", args.keep_rate));
  }
  options->verify_uploads = args.verify_gpu;
  if (args.verify_gpu && options->use == device::GpuOptions::Use::kNone) {
    return fail(ErrorCode::kInvalid, "--verify-gpu: --gpu none leaves nothing to verify");
  }
  std::istringstream words(args.gpu_wrapper);
  options->wrapper.assign(std::istream_iterator<std::string>(words), {});
  const std::string level = settings.log_level.empty() ? "info" : settings.log_level;
  options->arguments = {"--log-level", level, "--log-format", settings.log_format};
  return options;
}

Result<store::NumaPolicy> numa_policy(const AgentArgs& args) {
  auto policy = store::parse_numa(args.numa);
  auto chosen = policy ? store::NumaPlacement().choose(*policy, usable_numa_nodes())
                       : Result<void>(fail(policy.error()));
  if (!chosen) return fail(std::move(chosen).error().with_context("--numa"));
  return *policy;
}

// A mount would surprise in a directory that the user chose.
agent::AgentOptions::HugePages huge_pages(const Settings& settings, const AgentArgs& args) {
  using HugePages = agent::AgentOptions::HugePages;
  if (args.huge_pages == "mount") return HugePages::kRequired;
  const bool expected = settings.store == kDefaultStore && ::geteuid() == 0;
  return args.huge_pages == "auto" && expected ? HugePages::kIfPossible : HugePages::kAsItIs;
}

// Refuses values that peers would refuse, before anything runs.
Result<void> check_agent_options(const agent::AgentOptions& options) {
  TRY_VOID(check_address("--listen", options.listen));
  if (!options.data_listen.empty()) TRY_VOID(check_address("--data-listen", options.data_listen));
  if (!options.data_advertise.empty()) {
    TRY_VOID(check_address("--data-advertise", options.data_advertise));
  }
  if (!options.health.empty()) TRY_VOID(check_address("--health", options.health));
  if (!options.metrics.empty()) TRY_VOID(check_address("--metrics", options.metrics));
  if (auto usable = transport::tcp::check_congestion_control(options.tcp_congestion); !usable) {
    return fail(std::move(usable).error().with_context("--tcp-congestion"));
  }
  TRY_VOID(check_max_pullers(options.max_pullers));
  constexpr std::size_t kMaxNodeIdBytes = 255;
  const auto plain = [](char c) { return c > ' ' && c < 0x7f; };
  if (options.node_id.size() > kMaxNodeIdBytes || !std::ranges::all_of(options.node_id, plain)) {
    return fail(ErrorCode::kInvalid,
                "--node-id '{}': use at most {} printable ASCII characters without spaces",
                options.node_id, kMaxNodeIdBytes);
  }
  const std::string& host = options.advertise;
  const bool is_number = !rpc::numeric_endpoints({host, 1}).empty();
  const auto in_name = [](char c) {
    return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '.' || c == '-' || c == '_';
  };
  if (!is_number && !std::ranges::all_of(host, in_name)) {
    return fail(ErrorCode::kInvalid,
                "--advertise '{}' is not a host name or address (the port is that of --listen)",
                host);
  }
  return {};
}

Result<int> run_agent_command(const Settings& settings, AgentArgs args) {
  agent::AgentOptions& options = args.options;
  TRY_VOID(check_agent_options(options));
  options.store_directory = settings.store;
  options.coordinator = settings.coordinator;
  options.secret_file = settings.secret_file;
  if (!args.budget.empty()) {
    TRY(options.store_budget_bytes, parse_size("--budget", args.budget));
    if (options.store_budget_bytes == 0) {
      return fail(ErrorCode::kInvalid, "--budget 0: a store needs some bytes");
    }
  }
  options.huge_pages = huge_pages(settings, args);
  TRY(options.reserve_bytes, parse_size("--reserve", args.reserve));
  if (!args.max_rate.empty()) {
    TRY(options.max_bytes_per_second, parse_size("--max-rate", args.max_rate));
  }
  TRY(options.load_timeout, parse_duration("--load-timeout", args.load_timeout));
  if (options.load_timeout.count() == 0) {
    return fail(ErrorCode::kInvalid, "--load-timeout 0: no worker could ever load");
  }
  options.scrub = std::chrono::milliseconds(0);
  if (args.scrub != "off") {
    TRY(options.scrub, parse_duration("--scrub", args.scrub));
  }
  TRY(options.numa, numa_policy(args));
  TRY(options.gpu, gpu_options(settings, args));
  if (args.gpu_direct != "auto" && args.gpu_direct != "off") {
    return fail(ErrorCode::kInvalid, "--gpu-direct {}: auto or off", args.gpu_direct);
  }
  options.rdma.gpu_direct = args.gpu_direct == "auto";
  for (const auto& user : args.allow_uids) {
    TRY(const uid_t uid, parse_user("--allow-uid", user));
    options.allowed_uids.push_back(uid);
  }
  options.on_ready = [settings](const agent::AgentOptions::Listening& at) {
    announce(settings, "agent", at);
  };
  TRY_VOID(agent::run_agent(options));
  return kExitOk;
}

}  // namespace

void add_coordinator(Command& app, Session& session) {
  Command sub = app.command(
      "coordinator",
      "Run the control plane. It knows the agents and their copies, and grants pulls.\n"
      "It carries no weight bytes. Stops on SIGTERM or SIGINT; may be restarted at any moment.");
  auto args = std::make_shared<CoordinatorArgs>();
  sub.option("--listen", args->listen, "Address to listen on; port 0 = any [0.0.0.0:7300]")
      .type_name("HOST:PORT");
  sub.option("--state", args->state,
             "Directory of the durable state (epoch, version table)\n"
             "[StateDirectory= of its systemd unit, else /var/lib/rekindle/coordinator,\n"
             "or below ~/.local/state when not root]")
      .type_name("DIR");
  sub.option("--etcd", args->etcd.urls,
             "Keep the state in this etcd instead, so that several coordinators can stand by for\n"
             "each other; give agents and commands all addresses: --coordinator A:7300,B:7300")
      .type_name("URL,…");
  sub.option("--etcd-prefix", args->etcd.prefix, "Prefix of the keys; one per fleet [/rekindle/]")
      .type_name("PREFIX");
  sub.option("--etcd-ttl", args->etcd_ttl,
             "How long after the death of the leader another coordinator leads [5s]")
      .type_name("TIME");
  sub.option("--heartbeat", args->heartbeat, "Interval of the agents' heartbeats [250ms]")
      .type_name("TIME");
  sub.option("--suspect-after", args->suspect_after,
             "Silence after which no new pull is sent to an agent [750ms]")
      .type_name("TIME");
  sub.option("--dead-after", args->dead_after, "Silence after which an agent is gone [2s]")
      .type_name("TIME");
  sub.option("--max-pullers", args->max_pullers,
             "Pullers at the same time for each source that holds a whole version [8]")
      .type_name("N");
  sub.option("--replicas", args->replicas,
             "Whole copies of each version to keep, in different failure domains;\n"
             "`rekindle publish --replicas` sets it for one version [0]")
      .type_name("R")
      .between(0u, 1024u);
  sub.option("--recopy-rate", args->recopy_rate,
             "Bytes per second that a copy made for --replicas may take; 0 = no cap [256MiB]")
      .type_name("SIZE");
  sub.option("--metrics", args->metrics,
             "Address at which Prometheus scrapes GET /metrics, also of a coordinator that stands\n"
             "by; anyone who reaches it may read [none]")
      .type_name("HOST:PORT");
  add_otlp_option(sub, args->otlp);
  sub.runs_daemon(session, "coordinator",
                  [&session, args] { return run_coordinator_command(session.settings, *args); });
}

void add_agent(Command& app, Session& session) {
  Command sub = app.command(
      "agent",
      "Run this host's agent: keeps checkpoints in the store, serves them to peers, pulls for "
      "this\n"
      "host. Committed checkpoints outlive the process. Stops on SIGTERM or SIGINT.");
  auto args = std::make_shared<AgentArgs>();
  agent::AgentOptions& options = args->options;
  sub.option("--listen", options.listen,
             "Address of the control connection; port 0 = any [0.0.0.0:7400]")
      .type_name("HOST:PORT");
  sub.option("--data-listen", options.data_listen,
             "Address of the data streams [as --listen, any port]")
      .type_name("HOST:PORT");
  sub.option("--advertise", options.advertise,
             "Host name or address by which others reach this agent [detected]")
      .type_name("HOST");
  sub.option("--data-advertise", options.data_advertise,
             "Address of the data streams as others reach it, behind NAT or a proxy [as it is]")
      .type_name("HOST:PORT");
  sub.option("--node-id", options.node_id, "Name of this agent in the fleet [host name]")
      .type_name("NAME");
  sub.option("--failure-domain", options.failure_domain,
             "Name of the rack, power feed or zone that fails as one with this host")
      .type_name("NAME");
  sub.option("--budget", args->budget, "Bytes that the store may use [90 % of its file system]")
      .type_name("SIZE");
  sub.option(
         "--huge-pages", args->huge_pages,
         "Mount a tmpfs with huge pages for the store where it has none: auto (for the default\n"
         "--store, if root), mount (or fail), off [auto]")
      .one_of({"auto", "mount", "off"})
      .type_name("WHICH");
  sub.option("--reserve", args->reserve,
             "Memory that is allocated at the start and held for the next version, within the\n"
             "budget; grows to the size of the largest version. 0: none [0]")
      .type_name("SIZE");
  sub.option("--max-rate", args->max_rate,
             "Bytes per second that each puller may take from here over the network [no cap]")
      .type_name("SIZE");
  sub.option("--tcp-congestion", options.tcp_congestion,
             "Congestion control of the TCP data streams, such as cubic or bbr [the host's]")
      .type_name("NAME");
  sub.option("--max-pullers", options.max_pullers, "Pullers at the same time [64]").type_name("N");
  sub.option("--health", options.health,
             "Address of an HTTP endpoint for routers: GET /health, /ready, /ready/INSTANCE\n"
             "[none]")
      .type_name("HOST:PORT");
  sub.option("--metrics", options.metrics,
             "Address at which Prometheus scrapes GET /metrics; anyone who reaches it may read\n"
             "[none]")
      .type_name("HOST:PORT");
  add_otlp_option(sub, options.otlp);
  sub.option("--load-timeout", args->load_timeout,
             "Time for a worker to load its weights once they are on this host [10min]")
      .type_name("TIME");
  sub.option("--allow-uid", args->allow_uids,
             "Also serve workers of this user; repeat for more users. They may pass through the\n"
             "store's directory (mode 0711), and they trust an agent of root [own user]")
      .type_name("USER");
  sub.option("--scrub", args->scrub,
             "How often each copy is read again in the background, at 1 % of a core, to find\n"
             "bytes that went wrong in memory; off: never [24h]")
      .type_name("TIME");
  sub.option("--numa", args->numa,
             "NUMA nodes that copies lie on: auto (that of the GPU that reads the copy, else\n"
             "that of all NICs, else interleave), interleave (page by page over all that have\n"
             "CPUs), local (where they are touched first), or the number of one [auto]")
      .type_name("WHICH");
  sub.option("--gpu", args->gpu,
             "Fill workers' buckets on GPUs, in a separate process: auto (if there are any),\n"
             "none, or double:N[:BYTES], which are made of host memory, for tests [auto]")
      .type_name("WHICH");
  sub.option("--gpu-bucket", args->gpu_bucket,
             "Bytes of a bucket if a worker asks for no size [64MiB]")
      .type_name("SIZE");
  sub.option("--gpu-wrapper", args->gpu_wrapper,
             "Words before the command of that process, for a debugger or a sanitizer [none]")
      .type_name("WORDS");
  sub.option("--keep-rate", args->keep_rate,
             "Bytes per second that each GPU copies to its host during a broadcast, if the host\n"
             "lacks the version: it need not be fetched. Less if GPUs of other hosts take part\n"
             "and the network is fast. 0: none [8GB]")
      .type_name("SIZE");
  sub.flag("--verify-gpu", args->verify_gpu,
           "Verify each upload on the GPU before the worker gets it; broadcasts are\n"
           "always verified [off]");
  sub.option("--gpu-direct", args->gpu_direct,
             "Let NICs write weights into GPU memory, without a copy in host memory: auto (a\n"
             "GPU behind one PCIe switch with a NIC that takes dmabufs), or off. This has not\n"
             "run on hardware yet [off]")
      .type_name("WHICH");
  add_fabric_options(sub, options.rdma.fabric);
  sub.runs_daemon(session, "agent",
                  [&session, args] { return run_agent_command(session.settings, *args); });
}

namespace {

struct DeviceProcessArgs {
  int fd = -1;
  std::string doubles;
  std::int64_t release_ms = 0;
  std::uint64_t keep_rate = device::SessionTimes{}.keep_bytes_per_second;
};

Result<int> run_device_process_command(const DeviceProcessArgs& args) {
  device::DeviceProcessOptions options;
  if (!args.doubles.empty()) {
    TRY(options.doubles, device::parse_doubles(args.doubles));
  }
  if (args.release_ms > 0) options.times.release = std::chrono::milliseconds(args.release_ms);
  options.times.keep_bytes_per_second = args.keep_rate;
  if (::fcntl(args.fd, F_SETFD, FD_CLOEXEC) != 0) {
    return fail(ErrorCode::kInvalid,
                "--fd {}: this command is started by an agent, which gives it a socket", args.fd);
  }
  // It ends with its agent, even if it hangs. A signal to the whole process group may reach it
  // first.
  std::signal(SIGINT, SIG_IGN);
  std::signal(SIGTERM, SIG_IGN);
  std::signal(SIGHUP, SIG_IGN);
  (void)::prctl(PR_SET_PDEATHSIG, SIGKILL);
  (void)::prctl(PR_SET_NAME, "rekindle-device");
  const auto ran = device::run_device_process(UniqueFd(args.fd), options);
  if (ran) return kExitOk;
  log::error("device.lost", "why", ran.error());
  std::fflush(nullptr);
  std::_Exit(device::kDeviceLostExit);
}

}  // namespace

void add_device_process(Command& app, Session& session) {
  Command sub = app.command("device-process",
                            "Fill buckets on this host's GPUs. For agents, which start it.");
  sub.hide();
  auto args = std::make_shared<DeviceProcessArgs>();
  sub.option("--fd", args->fd, "Descriptor of the socket to the agent").required();
  sub.option("--double", args->doubles, "GPUs made of host memory, for tests").type_name("N:BYTES");
  sub.option("--release-ms", args->release_ms, "Time for a live worker to release a bucket");
  sub.option("--keep-rate", args->keep_rate,
             "Bytes of a broadcast that each device copies to its host in a second");
  sub.runs(session, "device-process", [args] { return run_device_process_command(*args); });
}

}  // namespace rekindle::cli
