#include "tools/cli/daemon_options.h"

#include <algorithm>
#include <cctype>
#include <iterator>
#include <sstream>

#include <unistd.h>

#include "recovery/coordinator/etcd/gateway.h"
#include "recovery/device/gpu_options.h"
#include "recovery/rpc/address.h"
#include "recovery/rpc/credentials.h"
#include "recovery/rpc/http_access.h"
#include "recovery/rpc/otlp_exporter.h"
#include "recovery/rpc/rights.h"
#include "src/base/units.h"
#include "src/bucket/bucket_plan.h"
#include "src/store/numa.h"
#include "tools/cli/arguments.h"
#include "tools/cli/publisher_keys.h"
#include "transport/tcp/tcp_transport.h"
#include "transport/verbs/host/topology.h"

namespace rekindle::cli {
namespace {

constexpr std::size_t kMostPullers = 65536;

Result<void> check_max_pullers(std::size_t count) {
  if (count >= 1 && count <= kMostPullers) return {};
  return fail(ErrorCode::kInvalid, "--max-pullers: 1 to {} are possible", kMostPullers);
}

// Without a host, the page is for this host only.
std::string http_address(const std::string& text) {
  if (text.starts_with(':')) return "127.0.0.1" + text;
  const bool port = !text.empty() && text.find_first_not_of("0123456789") == std::string::npos;
  return port ? "127.0.0.1:" + text : text;
}

// An address that may be left out.
Result<void> check_own_address(const char* option, const std::string& text) {
  return text.empty() ? Result<void>() : check_address(option, text);
}

Result<std::chrono::seconds> etcd_ttl(const std::string& text) {
  TRY(const auto ttl, parse_duration("--etcd-ttl", text));
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(ttl);
  if (seconds != ttl || seconds < std::chrono::seconds(2)) {
    return fail(ErrorCode::kInvalid, "--etcd-ttl {}: whole seconds, 2 at least", text);
  }
  return seconds;
}

// The shared options that both daemons use.
void check_shared(const Settings& settings, Problems& problems) {
  if (!settings.coordinator.empty()) {
    problems.check("coordinator", check_addresses("--coordinator", settings.coordinator));
  }
  if (auto secrets = rpc::read_secrets(settings.credentials.secret_file); !secrets) {
    problems.check("secret-file", fail(std::move(secrets).error().with_context("--secret-file")));
  } else if (auto opened = rpc::Credentials::open(settings.credentials); !opened) {
    problems.check(problems.set_one_of({"tls-cert", "tls-key", "tls-ca", "tls-crl"}),
                   fail(std::move(opened).error()));
  }
}

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
  auto helpers = device::parse_helpers(args.gpu_helpers);
  if (!helpers) return fail(std::move(helpers).error().with_context("--gpu-helpers"));
  options->helpers = *helpers;
  options->verify_uploads = args.verify_gpu;
  if (args.verify_gpu && options->use == device::GpuOptions::Use::kNone) {
    return fail(ErrorCode::kInvalid, "--verify-gpu: --gpu none leaves nothing to verify");
  }
  std::istringstream words(args.gpu_wrapper);
  options->wrapper.assign(std::istream_iterator<std::string>(words), {});
  options->arguments = {"--log-level", daemon_log_level(settings), "--log-format",
                        settings.log_format};
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

Result<std::uint64_t> budget(const AgentArgs& args) {
  if (args.budget.empty()) return std::uint64_t{0};
  TRY(const std::uint64_t bytes, parse_size("--budget", args.budget));
  if (bytes == 0) return fail(ErrorCode::kInvalid, "--budget 0: a store needs some bytes");
  return bytes;
}

Result<std::chrono::milliseconds> load_timeout(const AgentArgs& args) {
  TRY(const auto timeout, parse_duration("--load-timeout", args.load_timeout));
  if (timeout.count() == 0) {
    return fail(ErrorCode::kInvalid, "--load-timeout 0: no worker could ever load");
  }
  return timeout;
}

Result<std::chrono::milliseconds> scrub_interval(const char* option, const std::string& text) {
  if (text == "off") return std::chrono::milliseconds(0);
  return parse_duration(option, text);
}

Result<void> check_node_id(const std::string& node_id) {
  constexpr std::size_t kMaxNodeIdBytes = 255;
  const auto plain = [](char c) { return c > ' ' && c < 0x7f; };
  if (node_id.size() <= kMaxNodeIdBytes && std::ranges::all_of(node_id, plain)) return {};
  return fail(ErrorCode::kInvalid,
              "--node-id '{}': use at most {} printable ASCII characters without spaces", node_id,
              kMaxNodeIdBytes);
}

Result<void> check_advertise(const std::string& host) {
  const bool is_number = !rpc::numeric_endpoints({host, 1}).empty();
  const auto in_name = [](char c) {
    return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '.' || c == '-' || c == '_';
  };
  if (is_number || std::ranges::all_of(host, in_name)) return {};
  return fail(ErrorCode::kInvalid,
              "--advertise '{}' is not a host name or address (the port is that of --listen)",
              host);
}

void check_otlp(const std::string& url, Problems& problems) {
  if (url.empty()) return;
  if (auto target = rpc::OtlpTarget::parse(url); !target) {
    problems.check("otlp", fail(std::move(target).error()));
  }
}

// Refuses values that peers would refuse, before anything runs.
void check_network(const agent::AgentOptions& options, Problems& problems) {
  problems.check("listen", check_address("--listen", options.listen));
  problems.check("data-listen", check_own_address("--data-listen", options.data_listen));
  problems.check("data-advertise", check_own_address("--data-advertise", options.data_advertise));
  problems.check("health", check_own_address("--health", options.health));
  problems.check("metrics", check_own_address("--metrics", options.metrics));
  check_otlp(options.otlp, problems);
  if (auto usable = transport::tcp::check_congestion_control(options.tcp_congestion); !usable) {
    problems.check("tcp-congestion",
                   fail(std::move(usable).error().with_context("--tcp-congestion")));
  }
  problems.check("max-pullers", check_max_pullers(options.max_pullers));
  problems.check("node-id", check_node_id(options.node_id));
  problems.check("advertise", check_advertise(options.advertise));
  const auto& fabric = options.rdma.fabric;
  if (fabric.topology_file.empty()) return;
  auto topology = transport::verbs::Topology::open(fabric.sysfs, fabric.topology_file);
  if (!topology) {
    problems.check("topology", fail(std::move(topology).error().with_context("--topology")));
  }
}

void add_insecure_option(Command& sub, bool& insecure) {
  sub.flag("--insecure", insecure,
           "The network is trusted: listen beyond loopback without a secret or a certificate,\n"
           "and talk to peers that have none [off]");
}

// Of the servers of --metrics and --http.
void add_http_options(Command& sub, std::string& token_file, bool& open) {
  sub.option(
         "--http-token-file", token_file,
         "Tokens of readers without a certificate, as Prometheus sends them: a file of mode 0600\n"
         "with one or two lines of at least 16 bytes; changes are noticed [none]")
      .type_name("FILE")
      .not_empty();
  sub.flag("--http-open", open,
           "Whoever reaches the addresses of HTTP may read, without TLS [off]");
}

// Tokens are taken over https only.
void check_http_tokens(const std::string& file, const Settings& settings, Problems& problems) {
  if (auto tokens = rpc::HttpTokens::open(file); !tokens) {
    problems.check("http-token-file", fail(std::move(tokens).error()));
  } else if (!file.empty() && settings.credentials.certificate_file.empty()) {
    problems.check("http-token-file",
                   fail(ErrorCode::kInvalid,
                        "--http-token-file {}: tokens are taken over https only, and there is no "
                        "certificate: give --tls-cert, --tls-key and --tls-ca, or leave it out",
                        file));
  }
}

void add_audit_option(Command& sub, std::string& audit) {
  sub.option(
         "--audit", audit,
         "Write a line for each change that somebody makes here, and for each refusal, to this\n"
         "file, to `syslog` or to syslog:SOCKET (`rekindle audit verify`); SIGHUP opens the\n"
         "file again [nowhere]")
      .type_name("FILE")
      .not_empty();
}

}  // namespace

std::string Problems::set_one_of(std::initializer_list<const char*> options) {
  for (const char* option : options) {
    if (!places_[option].empty()) return option;
  }
  return *options.begin();
}

Result<void> Problems::none() const {
  if (all_.empty()) return {};
  Error first = all_.front().in_line();
  if (all_.size() == 1) return fail(std::move(first));
  return fail(first.code(), "{} (and {} more; `rekindle config check` lists those of a file)",
              first.message(), all_.size() - 1);
}

coordinator::CoordinatorOptions coordinator_options(const Settings& settings,
                                                    const CoordinatorArgs& args,
                                                    Problems& problems) {
  coordinator::CoordinatorOptions options;
  check_shared(settings, problems);
  problems.check("listen", check_address("--listen", args.listen));
  problems.check("metrics", check_own_address("--metrics", args.metrics));
  options.http = http_address(args.http);
  problems.check("http", check_own_address("--http", options.http));
  options.http_token_file = args.http_token_file;
  options.http_open = args.http_open;
  check_http_tokens(options.http_token_file, settings, problems);
  check_otlp(args.otlp, problems);
  problems.check("max-pullers", check_max_pullers(args.max_pullers));
  options.listen = args.listen;
  options.state_directory =
      args.state.empty() ? default_state_directory() : std::filesystem::path(args.state);
  options.credentials = settings.credentials;
  options.credentials.insecure = args.insecure;
  options.etcd = args.etcd;
  problems.take("etcd-ttl", options.etcd.ttl, etcd_ttl(args.etcd_ttl));
  if (!options.etcd.urls.empty()) {
    auto access = coordinator::etcd::access_of(options.etcd);
    if (!access) problems.check("etcd", fail(std::move(access).error()));
    if (!args.state.empty()) {
      problems.check("state", fail(ErrorCode::kInvalid,
                                   "--state and --etcd: the state lies in one of them, not both"));
    }
  } else if (!options.etcd.state_key_file.empty()) {
    problems.check("etcd-state-key",
                   fail(ErrorCode::kInvalid,
                        "--etcd-state-key {}: it authenticates the state in etcd, and there is no "
                        "--etcd: give that too, or leave the option out",
                        options.etcd.state_key_file));
  }
  const std::size_t before = problems.all().size();
  problems.take("heartbeat", options.heartbeat_interval,
                parse_duration("--heartbeat", args.heartbeat));
  problems.take("suspect-after", options.suspect_after,
                parse_duration("--suspect-after", args.suspect_after));
  problems.take("dead-after", options.dead_after, parse_duration("--dead-after", args.dead_after));
  if (problems.all().size() == before) {
    problems.check(problems.set_one_of({"dead-after", "suspect-after", "heartbeat"}),
                   coordinator::check_timing(options));
  }
  options.max_pullers_per_source = args.max_pullers;
  options.max_open_claims = args.max_open_claims;
  options.replicas = args.replicas;
  problems.take("recopy-rate", options.recopy_bytes_per_second,
                parse_size("--recopy-rate", args.recopy_rate));
  problems.take("trust-publisher", options.trust, read_trust(args.trust));
  options.metrics = args.metrics;
  options.otlp = args.otlp;
  options.rights_file = args.rights;
  if (!args.rights.empty()) {
    if (auto rights = rpc::Rights::read(args.rights)) {
      options.rights = std::make_shared<const rpc::Rights>(*std::move(rights));
    } else {
      problems.check("rights", fail(std::move(rights).error().with_context("--rights")));
    }
  }
  options.audit = args.audit;
  options.allow_drills = args.allow_drills;
  return options;
}

agent::AgentOptions agent_options(const Settings& settings, const AgentArgs& args,
                                  Problems& problems) {
  agent::AgentOptions options = args.options;
  check_shared(settings, problems);
  check_network(options, problems);
  check_http_tokens(options.http_token_file, settings, problems);
  options.store_directory = settings.store;
  options.coordinator = settings.coordinator;
  options.credentials = settings.credentials;
  options.credentials.insecure = args.insecure;
  problems.take("budget", options.store_budget_bytes, budget(args));
  options.huge_pages = huge_pages(settings, args);
  problems.take("reserve", options.reserve_bytes, parse_size("--reserve", args.reserve));
  if (!args.max_rate.empty()) {
    problems.take("max-rate", options.max_bytes_per_second,
                  parse_size("--max-rate", args.max_rate));
  }
  problems.take("load-timeout", options.load_timeout, load_timeout(args));
  problems.take("resident-ttl", options.resident_time_to_live,
                parse_duration("--resident-ttl", args.resident_ttl));
  options.starts_keeper = !args.external_keeper;
  problems.take("resident-scrub", options.resident_scrub,
                scrub_interval("--resident-scrub", args.resident_scrub));
  problems.take("scrub", options.scrub, scrub_interval("--scrub", args.scrub));
  problems.take("numa", options.numa, numa_policy(args));
  problems.take("gpu", options.gpu, gpu_options(settings, args));
  if (args.gpu_direct != "auto" && args.gpu_direct != "off") {
    problems.check("gpu-direct",
                   fail(ErrorCode::kInvalid, "--gpu-direct {}: auto or off", args.gpu_direct));
  }
  problems.take("trust-publisher", options.publishers.trust, read_trust(args.trust));
  if (!args.sign_key.empty()) {
    problems.take("sign-key", options.publishers.sign_key, read_sign_key(args.sign_key));
  }
  options.rdma.gpu_direct = args.gpu_direct == "auto";
  for (const auto& user : args.allow_uids) {
    auto uid = parse_user("--allow-uid", user);
    if (uid) {
      options.allowed_uids.push_back(*uid);
    } else {
      problems.check("allow-uid", fail(std::move(uid).error()));
    }
  }
  return options;
}

void add_coordinator_options(Command& sub, CoordinatorArgs& args) {
  sub.option("--listen", args.listen, "Address to listen on; port 0 = any [0.0.0.0:7300]")
      .type_name("HOST:PORT");
  sub.option("--state", args.state,
             "Directory of the durable state (epoch, version table)\n"
             "[StateDirectory= of its systemd unit, else /var/lib/rekindle/coordinator,\n"
             "or below ~/.local/state when not root]")
      .type_name("DIR");
  sub.option("--etcd", args.etcd.urls,
             "Keep the state in this etcd instead, so that several coordinators can stand by for\n"
             "each other; give agents and commands all addresses: --coordinator A:7300,B:7300")
      .type_name("URL,…");
  sub.option("--etcd-ca", args.etcd.authorities,
             "Certificates that etcd's is checked with, in PEM, for https:// [the system's]")
      .type_name("FILE");
  sub.option("--etcd-cert", args.etcd.certificate,
             "The certificate that etcd asks for, in PEM [none]")
      .type_name("FILE");
  sub.option("--etcd-key", args.etcd.key, "Its key; may be the same file").type_name("FILE");
  sub.option("--etcd-user", args.etcd.user, "User of etcd [none]").type_name("NAME");
  sub.option("--etcd-password-file", args.etcd.password_file,
             "Its password: a file of mode 0600 with at least 16 bytes")
      .type_name("FILE");
  sub.option("--etcd-state-key", args.etcd.state_key_file,
             "Authenticate the state in etcd with this key: a file of mode 0600 with at least 16\n"
             "bytes, the same for all coordinators [whoever can write to etcd is believed]")
      .type_name("FILE")
      .not_empty();
  sub.flag("--etcd-adopt-unsigned", args.etcd.adopt_unsigned,
           "Believe a state without authentication, and authenticate it. For one start [off]");
  sub.option("--etcd-prefix", args.etcd.prefix, "Prefix of the keys; one per fleet [/rekindle/]")
      .type_name("PREFIX");
  sub.option("--etcd-ttl", args.etcd_ttl,
             "How long after the death of the leader another coordinator leads [5s]")
      .type_name("TIME");
  sub.option("--heartbeat", args.heartbeat, "Interval of the agents' heartbeats [250ms]")
      .type_name("TIME");
  sub.option("--suspect-after", args.suspect_after,
             "Silence after which no new pull is sent to an agent [750ms]")
      .type_name("TIME");
  sub.option("--dead-after", args.dead_after, "Silence after which an agent is gone [2s]")
      .type_name("TIME");
  sub.option("--max-pullers", args.max_pullers,
             "Pullers at the same time for each source that holds a whole version [8]")
      .type_name("N");
  sub.option("--max-open-claims", args.max_open_claims,
             "Versions that one publisher may have claimed and not yet completed [256]")
      .type_name("N")
      .between(1u, 1'000'000u);
  sub.option("--replicas", args.replicas,
             "Whole copies of each version to keep, in different failure domains;\n"
             "`rekindle publish --replicas` sets it for one version [0]")
      .type_name("R")
      .between(0u, 1024u);
  sub.option("--recopy-rate", args.recopy_rate,
             "Bytes per second that a copy made for --replicas may take; 0 = no cap [256MiB]")
      .type_name("SIZE");
  add_trust_option(sub, args.trust);
  sub.option("--metrics", args.metrics,
             "Address at which Prometheus scrapes GET /metrics, also of a coordinator that stands\n"
             "by. Beyond loopback it is https, for certificates and tokens [none]")
      .type_name("HOST:PORT");
  add_otlp_option(sub, args.otlp);
  sub.option("--http", args.http,
             "Address of a status page for browsers. Without HOST, it is for this host only.\n"
             "Beyond loopback it is https, for those with the right `read` on all models [none]")
      .type_name("[HOST:]PORT");
  add_http_options(sub, args.http_token_file, args.http_open);
  sub.option("--rights", args.rights,
             "Who may do what, as JSON (`rekindle auth --help`); read again at SIGHUP\n"
             "[everybody who may connect has all rights]")
      .type_name("FILE")
      .not_empty();
  add_audit_option(sub, args.audit);
  sub.flag("--allow-drills", args.allow_drills, "Let `rekindle drill` kill this process [off]");
  add_insecure_option(sub, args.insecure);
}

void add_agent_options(Command& sub, AgentArgs& args) {
  agent::AgentOptions& options = args.options;
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
  add_insecure_option(sub, args.insecure);
  sub.option("--node-id", options.node_id,
             "Name of this agent in the fleet [of its certificate, else the host name]")
      .type_name("NAME");
  sub.option("--failure-domain", options.failure_domain,
             "Name of the rack, power feed or zone that fails as one with this host")
      .type_name("NAME");
  sub.option("--budget", args.budget, "Bytes that the store may use [90 % of its file system]")
      .type_name("SIZE");
  sub.option(
         "--huge-pages", args.huge_pages,
         "Mount a tmpfs with huge pages for the store where it has none: auto (for the default\n"
         "--store, if root), mount (or fail), off [auto]")
      .one_of({"auto", "mount", "off"})
      .type_name("WHICH");
  sub.option("--reserve", args.reserve,
             "Memory that is allocated at the start and held for the next version, within the\n"
             "budget; grows to the size of the largest version. 0: none [0]")
      .type_name("SIZE");
  sub.option("--max-rate", args.max_rate,
             "Bytes per second that each puller may take from here over the network [no cap]")
      .type_name("SIZE");
  sub.option("--tcp-congestion", options.tcp_congestion,
             "Congestion control of the TCP data streams, such as cubic or bbr [the host's]")
      .type_name("NAME");
  sub.flag("--encrypt", options.encrypt, "Pull over encrypted data streams only (TLS 1.3) [off]");
  sub.flag("--require-encryption", options.require_encryption,
           "Serve other hosts over encrypted data streams only [off]");
  sub.option("--max-pullers", options.max_pullers, "Pullers at the same time [64]").type_name("N");
  sub.option("--health", options.health,
             "Address of an HTTP endpoint for routers: GET /health, /ready, /ready/INSTANCE\n"
             "[none]")
      .type_name("HOST:PORT");
  sub.option("--metrics", options.metrics,
             "Address at which Prometheus scrapes GET /metrics. Beyond loopback it is https, for\n"
             "certificates and tokens [none]")
      .type_name("HOST:PORT");
  add_http_options(sub, options.http_token_file, options.http_open);
  add_otlp_option(sub, options.otlp);
  sub.option("--load-timeout", args.load_timeout,
             "Time for a worker to load its weights once they are on this host [10min]")
      .type_name("TIME");
  sub.option("--resident-ttl", args.resident_ttl,
             "How long the parameters of a dead worker stay in GPU memory for its successor; 0:\n"
             "workers cannot leave any [2min]")
      .type_name("TIME");
  sub.flag("--external-keeper", args.external_keeper,
           "Start no process that holds these parameters: another container runs\n"
           "`rekindle keeper --directory DIR/agent` [off]");
  sub.option("--resident-scrub", args.resident_scrub,
             "How long a GPU takes to read the parameters that workers leave there again, a piece\n"
             "at a time, to find bytes that went wrong; off: never [60s]")
      .type_name("TIME");
  sub.option("--allow-uid", args.allow_uids,
             "Also serve workers of this user; repeat, or separate several by commas. They may\n"
             "pass through the store's directory (mode 0711), and they trust an agent of root\n"
             "[own user]")
      .type_name("USER")
      .delimiter(',');
  add_trust_option(sub, args.trust);
  sub.option("--sign-key", args.sign_key,
             "Sign what workers of this host publish with this Ed25519 key (`rekindle keys new`)\n"
             "[unsigned]")
      .type_name("FILE");
  sub.option("--scrub", args.scrub,
             "How often each copy is read again in the background, at 1 % of a core, to find\n"
             "bytes that went wrong in memory; off: never [24h]")
      .type_name("TIME");
  sub.option("--numa", args.numa,
             "NUMA nodes that copies lie on: auto (that of the GPU that reads the copy, else\n"
             "that of all NICs, else interleave), interleave (page by page over all that have\n"
             "CPUs), local (where they are touched first), or the number of one [auto]")
      .type_name("WHICH");
  sub.option("--gpu", args.gpu,
             "Fill workers' buckets on GPUs, in a separate process: auto (if there are any),\n"
             "none, or double:N[:BYTES], which are made of host memory, for tests [auto]")
      .type_name("WHICH");
  sub.option("--gpu-bucket", args.gpu_bucket,
             "Bytes of a bucket if a worker asks for no size [64MiB]")
      .type_name("SIZE");
  sub.option("--gpu-helpers", args.gpu_helpers,
             "Idle GPUs, connected by NVLink, whose links to the host an upload to another GPU\n"
             "uses as well: auto (up to 3), none, or at most so many [auto]")
      .type_name("COUNT");
  sub.option("--gpu-wrapper", args.gpu_wrapper,
             "Words before the command of that process, for a debugger or a sanitizer [none]")
      .type_name("WORDS");
  sub.option("--keep-rate", args.keep_rate,
             "Bytes per second that each GPU copies to its host during a broadcast, if the host\n"
             "lacks the version: it need not be fetched. Less if GPUs of other hosts take part\n"
             "and the network is fast. 0: none [8GB]")
      .type_name("SIZE");
  sub.flag("--verify-gpu", args.verify_gpu,
           "Verify each upload on the GPU before the worker gets it; broadcasts are\n"
           "always verified [off]");
  sub.option("--gpu-direct", args.gpu_direct,
             "Let NICs write weights into GPU memory, without a copy in host memory: auto (a\n"
             "GPU behind one PCIe switch with a NIC that takes dmabufs), or off. This has not\n"
             "run on hardware yet [off]")
      .type_name("WHICH");
  add_audit_option(sub, options.audit);
  sub.flag("--allow-drills", options.allow_drills,
           "Let `rekindle drill` kill or freeze this process, kill its workers and silence\n"
           "its data links [off]");
  add_fabric_options(sub, options.rdma.fabric);
  add_trusted_rails_option(sub, options.rdma.fabric);
}

}  // namespace rekindle::cli
