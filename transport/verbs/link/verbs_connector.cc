// The puller's side: it pairs rails, makes queue pairs and proves each link with a read.
#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>
#include <thread>
#include <utility>

#include "src/base/log.h"
#include "transport/verbs/direct/direct_path.h"
#include "transport/verbs/link/rail_pairs.h"
#include "transport/verbs/link/verbs_connection.h"
#include "transport/verbs/link/verbs_wire.h"
#include "transport/verbs/memory/gpu_memory.h"
#include "transport/verbs/staged/staged_path.h"
#include "transport/verbs/verbs_transport.h"

namespace rekindle::transport::verbs {
namespace {

constexpr auto kProbeNap = std::chrono::microseconds(50);
// Several packets of the largest size.
constexpr std::uint32_t kProbeBytes = BouncePool::kScratchBytes;

// The shared state of handshakes and paths.
struct Shared {
  Shared(Fabric& rails, const VerbsConnectorOptions& choice, MemoryRegistrar& registrar)
      : fabric(rails),
        options(choice),
        memory(std::make_shared<LocalMemory>(registrar)),
        pools(fabric.devices().size()) {}

  Fabric& fabric;
  const VerbsConnectorOptions options;
  const std::shared_ptr<LocalMemory> memory;

  // The pool of one device is made when first needed. Handshakes on other devices do not wait for
  // it.
  struct Pool {
    std::mutex mutex;
    std::shared_ptr<BouncePool> pool;  // guarded by mutex
  };
  std::vector<Pool> pools;  // by Device::index()
  std::mutex mutex;
  // All paths of one session share one rate, now and later. Guarded by mutex.
  std::map<SessionToken, std::weak_ptr<RateLimiter>> limiters;

  Result<std::shared_ptr<BouncePool>> pool_of(Device& device);
  std::shared_ptr<RateLimiter> limiter_of(const SessionToken& token, std::uint64_t rate);
};

Result<std::shared_ptr<BouncePool>> Shared::pool_of(Device& device) {
  Pool& entry = pools[device.index()];
  const std::lock_guard lock(entry.mutex);
  if (entry.pool == nullptr) {
    TRY(auto made, BouncePool::create(device, options.bounce_bytes));
    entry.pool = std::move(made);
  }
  return entry.pool;
}

std::shared_ptr<RateLimiter> Shared::limiter_of(const SessionToken& token, std::uint64_t rate) {
  if (rate == 0) return nullptr;
  const std::lock_guard lock(mutex);
  std::erase_if(limiters, [](const auto& entry) { return entry.second.expired(); });
  auto limiter = limiters[token].lock();
  if (limiter == nullptr) {
    limiter = std::make_shared<RateLimiter>(rate);
    limiters[token] = limiter;
  }
  limiter->set_rate(rate);
  return limiter;
}

// This end of one link, until a path is made of it.
struct Link {
  std::unique_ptr<Connection> connection;
  RailInfo remote;
  std::shared_ptr<BouncePool> bounce;
};

class VerbsHandshake final : public Handshake {
 public:
  // Without links it only asks which rails the source has now. `why` says why there are none.
  VerbsHandshake(std::shared_ptr<Shared> shared, PathTarget target, std::vector<Link> links,
                 std::optional<Error> why = std::nullopt)
      : shared_(std::move(shared)),
        target_(std::move(target)),
        links_(std::move(links)),
        why_no_links_(std::move(why)) {
    ConnectRequest request;
    request.source = target_.incarnation;
    for (const auto& link : links_) {
      const Rail& rail = link.connection->rail();
      request.links.push_back({rail_info(rail), link.remote.index, link.connection->mtu_bytes(),
                               rail.device().limits().max_init_rd_atomic, link.connection->ends(),
                               stage_blocks_for(link.connection->send_depth())});
    }
    request_ = request.to_bytes();
  }

  const std::string& request() const override { return request_; }
  Result<Paths> finish(std::string_view bytes) override;
  const std::string& endpoint() const override { return endpoint_; }

 private:
  Result<std::unique_ptr<Path>> finish_link(Link link, LinkResponse response,
                                            const ConnectResponse& all,
                                            std::shared_ptr<RateLimiter> limiter) const;
  Result<void> probe(Connection& connection, const RemoteWindows& windows,
                     const LinkResponse& response, const BouncePool& bounce) const;

  const std::shared_ptr<Shared> shared_;
  const PathTarget target_;
  std::vector<Link> links_;
  const std::optional<Error> why_no_links_;
  std::string request_;
  std::string endpoint_;
};

Result<Paths> VerbsHandshake::finish(std::string_view bytes) {
  TRY(auto response, ConnectResponse::parse(bytes));
  if (response.source != target_.incarnation) {
    return fail(ErrorCode::kStale, "another incarnation answered: look the source up again");
  }
  if (response.links.size() != links_.size()) {
    return fail(ErrorCode::kInvalid, "the source answers for {} links, asked for {}",
                response.links.size(), links_.size());
  }
  endpoint_ = Endpoint{response.rails}.to_bytes();
  for (Link& link : links_) {  // an address may have changed since the offer
    const auto now =
        std::find_if(response.rails.begin(), response.rails.end(),
                     [&](const RailInfo& rail) { return rail.index == link.remote.index; });
    if (now != response.rails.end()) link.remote = *now;
  }
  if (why_no_links_) return fail(*why_no_links_);
  const auto limiter = shared_->limiter_of(target_.token, response.max_bytes_per_second);
  // All at once, as a broken rail takes time to show.
  std::vector<Result<std::unique_ptr<Path>>> results(links_.size());
  run_together(links_.size(), [&](std::size_t i) {
    results[i] = finish_link(std::move(links_[i]), std::move(response.links[i]), response, limiter);
  });
  Paths paths;
  std::optional<Error> problem;
  for (auto& path : results) {
    if (path) {
      paths.push_back(std::move(*path));
    } else {
      log::info("verbs.link_failed", "error", path.error().message());
      if (!problem) problem = std::move(path).error();
    }
  }
  if (paths.empty() && problem) return fail(std::move(*problem));
  // By now it is known for most memory whether it could be registered.
  shared_->memory->say_problems();
  return paths;
}

Result<std::unique_ptr<Path>> VerbsHandshake::finish_link(
    Link link, LinkResponse response, const ConnectResponse& all,
    std::shared_ptr<RateLimiter> limiter) const {
  const Rail& rail = link.connection->rail();
  std::string description =
      fmt::format("verbs {} {} -> {} {}", rail.name(), to_string(rail.state().address),
                  link.remote.name, to_string(link.remote.address));
  if (!response.error.empty()) {
    return fail(ErrorCode::kUnavailable, "{}: {}", description, response.error);
  }
  if (link.connection->rail_moved()) {
    return fail(ErrorCode::kUnavailable, "{}: {}", description, link.connection->why_moved());
  }
  RemoteEnd remote;
  remote.address = link.remote.address;
  remote.mtu_bytes = std::min(response.mtu_bytes, link.connection->mtu_bytes());
  remote.rd_atomic = std::min(response.rd_atomic, rail.device().limits().max_init_rd_atomic);
  remote.queue_pairs = response.queue_pairs;
  TRY_VOID(link.connection->connect(remote, ConnectionRole::kReads));
  VerbsPathParts parts{.windows = {},
                       .bounce = std::move(link.bounce),
                       .memory = shared_->memory,
                       .limiter = std::move(limiter),
                       .description = std::move(description),
                       .connection = std::move(link.connection)};
  if (response.stage) {
    TRY(auto path, StagedPath::create(std::move(parts), std::move(*response.stage), all.stale));
    TRY_VOID(path->prove(std::chrono::steady_clock::now() + shared_->options.probe_deadline));
    return path;
  }
  TRY(parts.windows,
      RemoteWindows::create(response.windows, all.stale, parts.connection->queue_pair_count()));
  TRY_VOID(probe(*parts.connection, parts.windows, response, *parts.bounce));
  ExpandLimits limits;
  limits.request_bytes = shared_->options.request_bytes;
  limits.bounce_bytes =
      std::min<std::uint32_t>(BouncePool::kBlockBytes, shared_->options.request_bytes);
  limits.max_sge = std::min(kMaxSge, parts.connection->max_sge());
  const std::uint64_t speed = parts.connection->rail().state().bytes_per_second;
  if (speed > 0) limits.costs.wire_byte_ns = 1e9 / static_cast<double>(speed);
  return std::make_unique<DirectPath>(std::move(parts), limits);
}

// Reads a few bytes over each queue pair. A link may not work in spite of the handshake: there may
// be no route back, large packets may be dropped, or a key may be wrong.
Result<void> VerbsHandshake::probe(Connection& connection, const RemoteWindows& windows,
                                   const LinkResponse& response, const BouncePool& bounce) const {
  if (response.windows.empty()) return {};
  const RemoteWindow& window = windows.at(response.windows.front().region, 0);
  const BouncePool::Block block = bounce.scratch();
  ibv_sge sge{reinterpret_cast<std::uint64_t>(block.data),
              static_cast<std::uint32_t>(std::min<std::uint64_t>(kProbeBytes, window.bytes)),
              block.lkey};
  Api& api = connection.api();
  std::size_t missing = 0;
  int error = 0;
  for (std::size_t i = 0; i < connection.queue_pair_count() && error == 0; ++i) {
    ibv_send_wr request{};
    request.opcode = IBV_WR_RDMA_READ;
    request.send_flags = IBV_SEND_SIGNALED;
    request.sg_list = &sge;
    request.num_sge = 1;
    request.wr.rdma.remote_addr = window.address;
    request.wr.rdma.rkey = window.key(i);
    ibv_send_wr* bad = nullptr;
    error = api.post_send(connection.queue_pair(i), &request, &bad);
    if (error == 0) ++missing;
  }
  const TimePoint deadline = std::chrono::steady_clock::now() + shared_->options.probe_deadline;
  ibv_wc_status worst = IBV_WC_SUCCESS;
  bool late = false;
  while (missing > 0) {
    std::array<ibv_wc, kMaxQueuePairs> completions;
    const int count =
        api.poll_cq(connection.cq(), static_cast<int>(completions.size()), completions.data());
    for (int i = 0; i < count; ++i) {
      const auto status = completions[static_cast<std::size_t>(i)].status;
      if (worst == IBV_WC_SUCCESS) worst = status;
      --missing;
    }
    late = std::chrono::steady_clock::now() >= deadline;
    if (count < 0 || late) break;
    if (count == 0) std::this_thread::sleep_for(kProbeNap);
  }
  if (error != 0) {
    return fail(ErrorCode::kUnavailable, "{}: post: {}", connection.rail().name(),
                std::strerror(error));
  }
  if (missing > 0) {
    return fail(ErrorCode::kUnavailable, "{}: a first read was not answered within {} ms",
                connection.rail().name(), shared_->options.probe_deadline.count());
  }
  if (worst != IBV_WC_SUCCESS) {
    return fail(ErrorCode::kUnavailable, "{}: a first read failed: {}", connection.rail().name(),
                ibv_wc_status_str(worst));
  }
  return {};
}

class VerbsConnector final : public HandshakeConnector {
 public:
  VerbsConnector(Fabric& fabric, MemoryRegistrar& registrar, const VerbsConnectorOptions& options)
      : shared_(std::make_shared<Shared>(fabric, options, registrar)) {}

  std::string_view transport() const override { return "verbs"; }
  bool usable() const override {
    const auto& rails = shared_->fabric.rails();
    return std::any_of(rails.begin(), rails.end(),
                       [](const auto& rail) { return Rail::is_up(rail->epoch()); });
  }
  std::shared_ptr<const void> use_memory(std::span<std::byte> memory,
                                         std::shared_ptr<MemoryLife> life) override {
    return shared_->memory->add(memory, std::move(life));
  }
  void prepare_memory(std::span<std::byte> memory, std::shared_ptr<MemoryLife> life,
                      TimePoint deadline) override {
    shared_->memory->prepare(memory, std::move(life), deadline);
  }
  Result<DeviceLanding> use_device_memory(int fd, std::uint64_t bytes,
                                          std::span<const std::string> homes) override;
  Result<std::unique_ptr<Handshake>> begin(const PathTarget& target,
                                           std::span<const std::string> in_use) override;

 private:
  Result<Link> begin_link(Rail& rail, const RailInfo& remote) const;

  const std::shared_ptr<Shared> shared_;
};

Result<DeviceLanding> VerbsConnector::use_device_memory(int fd, std::uint64_t bytes,
                                                        std::span<const std::string> homes) {
  DeviceLanding landing;
  std::vector<const Device*> devices;
  for (const auto& rail : shared_->fabric.rails()) {
    if (std::find(homes.begin(), homes.end(), rail->name()) == homes.end()) {
      landing.other_homes.push_back(rail->name());
    } else if (std::find(devices.begin(), devices.end(), &rail->device()) == devices.end()) {
      devices.push_back(&rail->device());
    }
  }
  TRY(auto memory, GpuMemory::create(devices, fd, bytes));
  landing.addresses = memory->addresses();
  landing.registered = shared_->memory->add(std::move(memory));
  return landing;
}

Result<std::unique_ptr<Handshake>> VerbsConnector::begin(const PathTarget& target,
                                                         std::span<const std::string> in_use) {
  TRY(const Endpoint endpoint, Endpoint::parse(target.endpoint));
  std::vector<RailInfo> local;
  for (const auto& rail : shared_->fabric.rails()) {
    if (rail->state().up) local.push_back(rail_info(*rail));
  }
  auto pairs = choose_rail_pairs(local, endpoint.rails);
  if (!pairs && local.empty()) return fail(std::move(pairs).error());
  if (!pairs) {
    return std::make_unique<VerbsHandshake>(shared_, target, std::vector<Link>(),
                                            std::move(pairs).error());
  }
  std::vector<RailPair> wanted;
  for (const RailPair& pair : *pairs) {
    const std::string& name = shared_->fabric.rails()[pair.local]->name();
    if (std::find(in_use.begin(), in_use.end(), name) == in_use.end()) wanted.push_back(pair);
  }
  // All at once, so that a slow device does not delay the others.
  std::vector<Result<Link>> made(wanted.size());
  run_together(wanted.size(), [&](std::size_t i) {
    const auto remote =
        std::find_if(endpoint.rails.begin(), endpoint.rails.end(),
                     [&](const RailInfo& info) { return info.index == wanted[i].remote; });
    made[i] = begin_link(*shared_->fabric.rails()[wanted[i].local], *remote);
  });
  std::vector<Link> links;
  std::optional<Error> problem;
  for (auto& link : made) {
    if (link) {
      links.push_back(std::move(*link));
    } else {
      problem = std::move(link).error();
    }
  }
  if (links.empty()) {
    if (problem) return fail(std::move(*problem));
    return fail(ErrorCode::kNotFound, "every rail to that source is in use");
  }
  return std::make_unique<VerbsHandshake>(shared_, target, std::move(links));
}

Result<Link> VerbsConnector::begin_link(Rail& rail, const RailInfo& remote) const {
  ConnectionOptions options;
  options.queue_pairs = std::min(shared_->options.queue_pairs, kMaxQueuePairs);
  options.send_depth = shared_->options.send_depth;
  options.max_sge = kMaxSge;
  options.recv_depth = kMaxStageBlocks;  // answers of a source that stages
  TRY(auto connection, Connection::create(rail, options));
  TRY(auto bounce, shared_->pool_of(rail.device()));
  return Link{std::move(connection), remote, std::move(bounce)};
}

}  // namespace

std::unique_ptr<HandshakeConnector> make_connector(Fabric& fabric, MemoryRegistrar& registrar,
                                                   const VerbsConnectorOptions& options) {
  return std::make_unique<VerbsConnector>(fabric, registrar, options);
}

}  // namespace rekindle::transport::verbs
