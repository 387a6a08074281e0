#include "recovery/agent/agent_daemon.h"

#include <utility>

#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/address.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/signal_set.hpp>
#include <boost/asio/this_coro.hpp>
#include <boost/asio/use_awaitable.hpp>

#include "proto/drill.pb.h"
#include "proto/rights.pb.h"
#include "recovery/agent/agent_core.h"
#include "recovery/agent/agent_metrics.h"
#include "recovery/agent/fleet_bench.h"
#include "recovery/agent/fleet_rights.h"
#include "recovery/agent/link_drill.h"
#include "recovery/agent/local_agent.h"
#include "recovery/agent/local_commands.h"
#include "recovery/agent/local_interface.h"
#include "recovery/agent/peer_service.h"
#include "recovery/agent/worker_host.h"
#include "recovery/device/device_link.h"
#include "recovery/rpc/address.h"
#include "recovery/rpc/drills.h"
#include "recovery/rpc/http_server.h"
#include "recovery/rpc/methods.h"
#include "recovery/rpc/otlp_exporter.h"
#include "recovery/rpc/rights.h"
#include "recovery/rpc/rpc_metrics.h"
#include "recovery/rpc/tls.h"
#include "recovery/trace/trace_wire.h"
#include "recovery/worker/worker_service.h"
#include "src/async/offload.h"
#include "src/async/task.h"
#include "src/async/task_group.h"
#include "src/base/clock.h"
#include "src/base/durable_directory.h"
#include "src/base/log.h"
#include "src/base/units.h"
#include "src/base/version.h"
#include "src/store/huge_pages.h"
#include "transport/link_cuts.h"
#include "transport/path.h"
#include "transport/shm/shm_transport.h"
#include "transport/tcp/tcp_transport.h"

namespace rekindle::agent {

namespace {

using async::Task;

constexpr std::chrono::milliseconds kCloseDeadline{2000};
constexpr std::chrono::minutes kTendInterval{1};
// For one file of the reserve; the rest of it is registered by the pull that takes the file.
constexpr std::chrono::seconds kPrepareDeadline{10};
// A cancelled pull drains.
constexpr std::chrono::milliseconds kLocalCloseDeadline{10000};

bool is_loopback(const std::string& host) {
  boost::system::error_code not_numeric;
  const auto address = boost::asio::ip::make_address(host, not_numeric);
  return host == "localhost" || (!not_numeric && address.is_loopback());
}

bool is_wildcard(const std::string& host) {
  return host.empty() || host == "0.0.0.0" || host == "::";
}

proto::DeviceProcess to_proto(const device::LinkStatus& status) {
  proto::DeviceProcess process;
  process.set_state(std::string(to_string(status.state)));
  for (const auto& info : status.devices) {
    auto& device = *process.add_devices();
    device.set_id(info.id);
    device.set_name(info.name);
    device.set_total_bytes(info.total_bytes);
  }
  process.set_held_bytes(status.held_bytes);
  process.set_pinned_bytes(status.pinned_bytes);
  process.set_sessions(static_cast<std::uint32_t>(status.sessions));
  process.set_restarts(status.restarts);
  process.set_pid(status.pid);
  process.set_problem(status.problem);
  return process;
}

// One control thread, the transports' servers, the listeners, and the device process beside it.
class Daemon {
 public:
  Daemon(boost::asio::io_context& context, const AgentOptions& options, rpc::Tracing& tracing)
      : context_(context),
        options_(options),
        tracing_(tracing),
        signals_(context, SIGTERM, SIGINT) {
    if (options.reread) hangups_.add(SIGHUP);
  }

  Result<void> start();
  Task<void> wait_and_stop();

 private:
  Result<void> start_servers(const rpc::HostPort& listen);
  Result<void> listen_control();
  Result<void> start_workers();
  std::string node_id() const;
  std::string choose_host(const rpc::HostPort& listen) const;
  Result<void> listen_http();
  void install_status();
  proto::AgentStatusResponse status() const;
  void read_metrics(metrics::Readings& readings) const;
  Task<void> tend_memory();
  Task<void> reload_at_signal();

  boost::asio::io_context& context_;
  const AgentOptions& options_;
  rpc::Tracing& tracing_;
  boost::asio::signal_set signals_;
  boost::asio::signal_set hangups_{context_};
  // nullptr: nobody asks for metrics.
  std::unique_ptr<metrics::Metrics> metrics_;
  std::unique_ptr<rpc::RpcMetrics> call_metrics_;
  std::shared_ptr<const metrics::Metrics::Read> readings_;
  transport::LinkCuts links_;
  std::shared_ptr<rpc::Credentials> credentials_;
  rpc::AuditedCalls audit_;
  std::unique_ptr<AgentCore> core_;
  std::unique_ptr<transport::tcp::TcpServer> tcp_;
  std::unique_ptr<transport::shm::ShmServer> shm_;
  // Null: this host has no RDMA.
  std::unique_ptr<transport::Server> verbs_;
  std::unique_ptr<FleetRights> rights_;
  std::unique_ptr<PeerService> peers_;
  std::unique_ptr<FleetBench> bench_;
  std::unique_ptr<rpc::RpcServer> server_;
  std::unique_ptr<rpc::RpcServer> local_server_;
  std::unique_ptr<device::DeviceLink> devices_;
  std::unique_ptr<WorkerHost> worker_host_;
  std::unique_ptr<worker::WorkerService> workers_;
  // Null: not configured.
  std::unique_ptr<rpc::HttpServer> health_;
  std::unique_ptr<rpc::HttpServer> scraped_;
  std::string host_;
  std::string control_address_;
  async::TaskGroup tasks_{context_.get_executor()};
  TimePoint started_ = std::chrono::steady_clock::now();
};

Result<void> provide_huge_pages(const AgentOptions& options) {
  using HugePages = AgentOptions::HugePages;
  if (options.huge_pages == HugePages::kAsItIs) return {};
  auto mounted = store::mount_huge_pages(
      std::filesystem::absolute(options.store_directory).lexically_normal());
  if (mounted) return {};
  if (options.huge_pages == HugePages::kRequired) {
    return fail(std::move(mounted).error().with_context("--huge-pages mount"));
  }
  log::info("store.no_huge_pages", "why", mounted.error(), "effect",
            "allocating and pinning copies takes longer");
  return {};
}

Result<void> Daemon::start() {
  TRY_VOID(provide_huge_pages(options_));
  TRY(credentials_, rpc::Credentials::open(options_.credentials));
  TRY_VOID(rpc::check_exposure("the agent", options_.listen, credentials_,
                               options_.credentials.insecure));
  if (!options_.data_listen.empty()) {
    TRY_VOID(rpc::check_exposure("the data port of the agent", options_.data_listen, credentials_,
                                 options_.credentials.insecure));
  }
  TRY(const auto listen, rpc::HostPort::parse(options_.listen));
  if (!options_.audit.empty()) {
    TRY(auto audit, rpc::AuditLog::open(options_.audit));
    audit_.set_audit(std::move(audit));
    audit_.note({.act = "agent_started"});
  }
  CoreOptions core_options;
  core_options.node_id = node_id();
  core_options.store_directory = options_.store_directory;
  core_options.store_budget_bytes = options_.store_budget_bytes;
  core_options.keep_memory = true;
  core_options.reserve_bytes = options_.reserve_bytes;
  core_options.numa = options_.numa;
  core_options.coordinator = options_.coordinator;
  core_options.credentials = credentials_;
  core_options.publishers = options_.publishers;
  core_options.audit = &audit_;
  core_options.rdma = options_.rdma;
  core_options.rdma.trusted_only = options_.encrypt || options_.require_encryption;
  core_options.tcp_congestion = options_.tcp_congestion;
  core_options.encrypt = options_.encrypt;
  core_options.scrub.every = options_.scrub;
  core_options.tracer = &tracing_.tracer;
  if (options_.allow_drills) core_options.links = &links_;
  if (!options_.metrics.empty()) {
    metrics_ = std::make_unique<metrics::Metrics>();
    call_metrics_ = std::make_unique<rpc::RpcMetrics>(*metrics_);
    core_options.metrics = metrics_.get();
  }
  TRY(core_, AgentCore::create(context_.get_executor(), core_options));
  host_ = choose_host(listen);
  TRY_VOID(start_servers(listen));
  TRY_VOID(listen_control());
  core_->connect_coordinator(options_.failure_domain, control_address_);
  TRY_VOID(start_workers());
  TRY_VOID(listen_http());
  core_->health().start();
  tasks_.spawn("agent.memory", tend_memory());
  if (options_.reread) tasks_.spawn("agent.reload", reload_at_signal());
  log::info("agent.ready", "node", core_->identity().node_id, "control", control_address_, "data",
            tcp_->endpoint(host_), "store", options_.store_directory.string());
  if (options_.on_ready) {
    options_.on_ready({control_address_, tcp_->endpoint(host_),
                       health_ != nullptr ? health_->address() : "",
                       scraped_ != nullptr ? scraped_->address() : ""});
  }
  return {};
}

// Without a choice of the user, the certificate's, because it fits no other.
std::string Daemon::node_id() const {
  if (!options_.node_id.empty() || credentials_ == nullptr) return options_.node_id;
  return rpc::certified_node(credentials_->context()->principals, "agent");
}

std::string Daemon::choose_host(const rpc::HostPort& listen) const {
  if (!options_.advertise.empty()) return options_.advertise;
  if (!is_wildcard(listen.host)) return listen.host;
  const auto coordinators = rpc::parse_addresses(options_.coordinator);
  auto host = local_host_towards(coordinators.value_or(std::vector<std::string>()));
  if (is_loopback(host)) {
    log::warn("agent.loopback", "advertised", host, "coordinator", options_.coordinator, "hint",
              "other hosts cannot reach this agent; on several hosts, give --advertise ADDRESS");
  }
  return host;
}

Result<void> Daemon::start_servers(const rpc::HostPort& listen) {
  transport::tcp::ServerOptions tcp_options;
  tcp_options.listen_host = listen.host;
  tcp_options.congestion = options_.tcp_congestion;
  tcp_options.require_encryption = options_.require_encryption;
  if (!options_.data_listen.empty()) {
    TRY(const auto data, rpc::HostPort::parse(options_.data_listen));
    tcp_options.listen_host = data.host;
    tcp_options.port = data.port;
  }
  const Incarnation& incarnation = core_->identity().incarnation;
  TRY(tcp_, transport::tcp::TcpServer::create(tcp_options, core_->registry(), incarnation));
  TRY(shm_, transport::shm::ShmServer::create({}, core_->registry(), incarnation));
  std::vector<transport::Server*> servers{shm_.get(), tcp_.get()};
  if (core_->rdma() != nullptr) {
    verbs_ = core_->rdma()->serve(core_->registry(), incarnation);
    servers.push_back(verbs_.get());
  }
  PeerSessions::Options peer_options;
  peer_options.limits = {options_.max_bytes_per_second, options_.max_pullers};
  peer_options.advertised_host = [this] { return host_; };
  peer_options.require_verified = [this](std::shared_ptr<const store::StoredVersion> stored,
                                         std::chrono::milliseconds patience) {
    return core_->health().verifier().require(std::move(stored), patience);
  };
  rights_ = std::make_unique<FleetRights>(core_->link());
  peer_options.may_read = [this](rpc::Peer peer, std::string model) {
    return rights_->may_read(std::move(peer), std::move(model));
  };
  if (!options_.data_advertise.empty()) {
    TRY(const auto endpoint, rpc::HostPort::parse(options_.data_advertise));
    peer_options.tcp_endpoint = endpoint.to_string();
  }
  PeerSessions::Parts parts{core_->identity(), core_->served(),    core_->grant_clock(),
                            core_->registry(), std::move(servers), core_->blocking_pool()};
  peers_ = std::make_unique<PeerService>(context_.get_executor(), std::move(parts),
                                         core_->digest_pool(), std::move(peer_options));
  core_->serve_through(peers_->sessions());
  return {};
}

Result<void> Daemon::listen_control() {
  const auto executor = context_.get_executor();
  server_ = rpc::RpcServer::create(executor, core_->identity());
  local_server_ = rpc::RpcServer::create(executor, core_->identity());
  if (call_metrics_ != nullptr) {
    for (rpc::RpcServer* server : {server_.get(), local_server_.get()}) {
      server->on_call_ended([this](proto::Method method, bool failed, Duration took) {
        call_metrics_->count(method, failed, took);
      });
    }
  }
  for (rpc::RpcServer* server : {server_.get(), local_server_.get()}) {
    server->trace_calls(tracing_.tracer);
    server->guard_calls(audit_);
    rpc::handle<proto::FIND_TRACE>(*server,
                                   [this](rpc::Peer peer, proto::TraceRequest request,
                                          rpc::Events) -> Task<Result<proto::TraceResponse>> {
                                     if (!peer.local_user) {
                                       CO_TRY_VOID(co_await rights_->may_read(peer, ""));
                                     }
                                     co_return trace::find_trace(tracing_.tracer, request);
                                   });
  }
  serve_local_commands(*local_server_, *core_);
  rpc::handle<proto::LOCAL_RELEASE>(
      *local_server_,
      [this](rpc::Peer, proto::LocalReleaseRequest request,
             rpc::Events) -> Task<Result<proto::LocalReleaseResponse>> {
        proto::LocalReleaseResponse response;
        if (workers_ == nullptr) co_return response;
        const std::optional<std::uint64_t> version =
            request.version() > 0 ? std::optional(request.version()) : std::nullopt;
        response.set_released(workers_->residents().release(request.model(), version,
                                                            request.device(), "was released"));
        co_return response;
      });
  rpc::handle<proto::LOCAL_SWITCH>(*local_server_,
                                   [this](rpc::Peer, proto::LocalSwitchRequest request,
                                          rpc::Events) -> Task<Result<proto::LocalSwitchResponse>> {
                                     if (workers_ == nullptr) {
                                       co_return fail(ErrorCode::kUnavailable,
                                                      "this agent is still starting; try again");
                                     }
                                     auto switching = workers_->switch_model(std::move(request));
                                     co_return co_await std::move(switching);
                                   });
  peers_->install(*server_);
  core_->joint().install(*server_);
  install_status();
  TRY(const auto bound, server_->listen(options_.listen));
  TRY(const auto bound_port, rpc::HostPort::parse(bound));
  control_address_ = rpc::HostPort{host_, bound_port.port}.to_string();
  const auto socket = agent_socket(options_.store_directory);
  TRY_VOID(make_directory_durably(socket.parent_path()));
  TRY_VOID(core_->grant_clock().epochs().keep_in(socket.parent_path() / "epoch",
                                                 std::chrono::steady_clock::now()));
  return local_server_->listen_unix(socket);
}

// Last, because workers may attach from here on.
Result<void> Daemon::start_workers() {
  device::LinkOptions devices;
  devices.gpu = options_.gpu;
  devices_ = std::make_unique<device::DeviceLink>(context_.get_executor(), std::move(devices));
  devices_->start();
  worker_host_ = std::make_unique<WorkerHost>(*core_, devices_.get());
  worker::ServiceOptions service;
  service.directory = agent_socket(options_.store_directory).parent_path();
  service.incarnation = core_->identity().incarnation;
  service.session_times.load = options_.load_timeout;
  service.resident_time_to_live = options_.resident_time_to_live;
  service.starts_keeper = options_.starts_keeper;
  service.resident_scrub = options_.resident_scrub;
  service.allowed_uids = options_.allowed_uids;
  service.verify_uploads = options_.gpu.verify_uploads;
  // The operator answers for what NCCL uses on hosts with trusted rails.
  service.broadcasts =
      !(options_.encrypt || options_.require_encryption) || !options_.rdma.fabric.trusted.empty();
  service.metrics = metrics_.get();
  service.tracer = &tracing_.tracer;
  TRY(workers_,
      worker::WorkerService::start(*worker_host_, context_.get_executor(), std::move(service)));
  devices_->tell_events(workers_.get());
  core_->readers().set_workers(
      {.count = [this](const ModelVersion& id) { return workers_->readers_of(id); },
       .end = [this](ModelVersion id) { return workers_->before_retire(std::move(id)); }});
  core_->duties().tell_events([this](std::uint64_t after, std::size_t most) {
    return workers_->fleet_events(after, most);
  });
  core_->duties().tell_drained([this](bool drained) { workers_->residents().drain(drained); });
  core_->health().tell_events([this](std::string kind, const ModelVersion& id, std::string why) {
    worker::Event event;
    event.kind = std::move(kind);
    event.version = id;
    event.why = std::move(why);
    workers_->note(std::move(event));
  });
  return {};
}

Result<void> Daemon::listen_http() {
  const auto executor = context_.get_executor();
  if (!options_.health.empty()) {
    TRY(health_,
        rpc::HttpServer::listen(executor, "--health", options_.health,
                                [this](const rpc::HttpRequest& request) {
                                  auto answer = workers_->board().get(request.target);
                                  return rpc::HttpAnswer{answer.status, std::move(answer.body)};
                                }));
  }
  if (metrics_ == nullptr) return {};
  readings_ = metrics_->add([this](metrics::Readings& readings) { read_metrics(readings); });
  TRY(auto tokens, rpc::HttpTokens::open(options_.http_token_file));
  const rpc::HttpProtection protection{credentials_, std::move(tokens),
                                       options_.http_open || options_.credentials.insecure};
  TRY(scraped_, rpc::serve_metrics(executor, options_.metrics, protection, *metrics_));
  return {};
}

void Daemon::read_metrics(metrics::Readings& readings) const {
  AgentFigures figures;
  figures.epoch = core_->link().epoch();
  figures.pooled_bytes = core_->store().pooled_bytes();
  figures.tcp_connections = tcp_->stats().connections;
  figures.scrub = core_->health().scrubbed();
  if (workers_ != nullptr) figures.residents = workers_->resident_totals();
  if (core_->rdma() != nullptr) figures.windows = core_->rdma()->windows();
  read_agent(status(), figures, readings);
  tracing_.read(readings);
}

void Daemon::install_status() {
  const auto handler = [this](rpc::Peer peer, proto::AgentStatusRequest request,
                              rpc::Events) -> Task<Result<proto::AgentStatusResponse>> {
    if (request.has_events() && workers_ != nullptr) {
      proto::AgentStatusResponse response;
      *response.mutable_events() = co_await workers_->events_after(request.events());
      co_return co_await rights_->readable(std::move(peer), std::move(response));
    }
    co_return co_await rights_->readable(std::move(peer), status());
  };
  rpc::handle<proto::AGENT_STATUS>(*server_, handler);
  rpc::handle<proto::AGENT_STATUS>(*local_server_, handler);
  const auto whoami = [](rpc::Peer peer, proto::WhoamiRequest,
                         rpc::Events) -> Task<Result<proto::WhoamiResponse>> {
    co_return rpc::whoami(peer);
  };
  rpc::handle<proto::WHOAMI>(*server_, whoami);
  rpc::handle<proto::WHOAMI>(*local_server_, whoami);
  const auto kill_worker = [this](const std::string& instance, std::uint32_t rank,
                                  bool dry_run) -> Result<std::uint32_t> {
    if (workers_ == nullptr) return fail(ErrorCode::kUnavailable, "the agent is starting");
    return workers_->kill(instance, rank, dry_run);
  };
  bench_ = std::make_unique<FleetBench>(core_->environment(), peers_->sessions(), core_->registry(),
                                        core_->rdma());
  const auto data = [this](rpc::Peer peer,
                           proto::DrillRequest request) -> Task<Result<proto::DrillResponse>> {
    if (request.has_cut_links() || request.has_list_routes()) {
      co_return answer_link_drill(links_, core_->rdma(), peer, request);
    }
    auto bench = bench_->answer(std::move(peer), std::move(request));
    co_return co_await std::move(bench);
  };
  const auto admit = [this](rpc::Peer peer) {
    return rights_->may(std::move(peer), rpc::Verb::kAdmin, "");
  };
  rpc::serve_drills(*server_, context_.get_executor(),
                    {options_.allow_drills, admit, kill_worker, data});
}

proto::AgentStatusResponse Daemon::status() const {
  proto::AgentStatusResponse response;
  *response.mutable_node() = core_->address();
  response.set_software(std::string(software_version()));
  response.set_uptime_ms(
      static_cast<std::uint64_t>(milliseconds(std::chrono::steady_clock::now() - started_)));
  response.set_store(options_.store_directory.string());
  response.set_store_bytes(core_->store().used_bytes());
  response.set_store_budget_bytes(core_->store().budget_bytes());
  for (const auto& [key, served] : core_->served().all()) {
    *response.add_holdings() = make_holding(served);
  }
  for (auto& copy : core_->health().statuses()) *response.add_copies() = std::move(copy);
  response.set_sessions(static_cast<std::uint32_t>(peers_->sessions().count()));
  const transport::tcp::ServerStats tcp = tcp_->stats();
  response.set_bytes_served(tcp.bytes_sent);
  response.set_bytes_served_encrypted(tcp.bytes_sent_encrypted);
  response.set_encrypts(options_.encrypt);
  response.set_requires_encryption(options_.require_encryption);
  response.set_coordinator(options_.coordinator);
  response.set_coordinator_connected(core_->link().client() != nullptr);
  if (workers_ != nullptr) workers_->add_status(response);
  if (devices_ != nullptr) *response.mutable_devices() = to_proto(devices_->status());
  return response;
}

// Gives the memory of retired versions back when no other version has taken it for a while, and
// refills the reserve, in parts so that the agent can stop in between. Each part is registered with
// the NICs and pinned for the GPUs, as far as that is possible.
Task<void> Daemon::tend_memory() {
  co_await boost::asio::this_coro::throw_if_cancelled(false);
  bool told = false;
  while (!co_await async::is_cancelled()) {
    auto tend = [this] {
      core_->store().trim_pool(steady_now());
      return core_->store().top_up_reserve([this](store::MappedSegment& file) {
        worker_host_->hold_reserve(file, context_.get_executor());
        if (core_->rdma() == nullptr) return;
        core_->rdma()->connector().prepare_memory(file.writable(), file.life(),
                                                  steady_now() + kPrepareDeadline);
      });
    };
    auto tended = async::offload(core_->blocking_pool(), std::move(tend));
    const Result<std::uint64_t> added = co_await std::move(tended);
    if (!added && !std::exchange(told, true)) {
      log::warn("store.reserve", "error", added.error(), "effect", "pulls allocate their memory");
    }
    if (added && *added != 0) {
      log::info("store.reserve", "added", format_bytes(*added));
      continue;
    }
    co_await async::sleep_for(kTendInterval);
  }
}

// Ends a cut of links, too. Pullers that have a session keep its rate, and workers that load keep
// their time.
Task<void> Daemon::reload_at_signal() {
  co_await boost::asio::this_coro::throw_if_cancelled(false);
  for (;;) {
    boost::system::error_code error;
    co_await hangups_.async_wait(boost::asio::redirect_error(boost::asio::use_awaitable, error));
    if (error) co_return;
    links_.heal();
    auto reading = async::offload(core_->blocking_pool(), options_.reread);
    Result<AgentOptions> read = co_await std::move(reading);
    if (read && credentials_ != nullptr) {
      if (auto taken = credentials_->reload(read->credentials); !taken) read = fail(taken.error());
    }
    audit_.reloaded(read ? Result<void>() : fail(read.error()));
    if (!read) {
      log::error("config.refused", "why", read.error(), "effect", "the settings stay as they are");
      continue;
    }
    peers_->sessions().set_limits({read->max_bytes_per_second, read->max_pullers});
    core_->health().set_scrub_interval(read->scrub);
    workers_->set_load_timeout(read->load_timeout);
    workers_->set_resident_scrub(read->resident_scrub);
    log::info("config.reloaded");
  }
}

Task<void> Daemon::wait_and_stop() {
  boost::system::error_code error;
  const int signal =
      co_await signals_.async_wait(boost::asio::redirect_error(boost::asio::use_awaitable, error));
  // The next signal ends the process at once.
  signals_.clear();
  log::info("agent.stopping", "signal", signal);
  co_await local_server_->close(kLocalCloseDeadline);
  if (health_ != nullptr) co_await health_->close(kCloseDeadline);
  if (scraped_ != nullptr) co_await scraped_->close(kCloseDeadline);
  co_await workers_->close(kLocalCloseDeadline);
  co_await devices_->close(kCloseDeadline);
  devices_->tell_events(nullptr);
  // A read for a benchmark ends here, as a pull does above: the engine must not go before it.
  co_await server_->close(kLocalCloseDeadline);
  co_await peers_->sessions().drain(kLocalCloseDeadline);
  (void)co_await tasks_.close(kCloseDeadline);
  co_await core_->stop();
  context_.stop();
}

}  // namespace

Result<void> run_agent(const AgentOptions& options) {
  const std::string node = options.node_id.empty() ? default_node_id() : options.node_id;
  // Outlives the calls that the context may still have.
  TRY(const auto tracing, rpc::Tracing::create("agent", node, options.otlp));
  boost::asio::io_context context(1);
  Daemon daemon(context, options, *tracing);
  TRY_VOID(daemon.start());
  boost::asio::co_spawn(context, daemon.wait_and_stop(), boost::asio::detached);
  context.run();
  return {};
}

}  // namespace rekindle::agent
