#include "tools/bench/bench_run.h"

#if REKINDLE_WITH_VERBS
#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <mutex>
#include <optional>
#include <thread>

#include <poll.h>
#include <sys/socket.h>

#include "src/base/units.h"
#include "transport/verbs/link/rail_pairs.h"
#include "transport/verbs/link/verbs_wire.h"
#include "transport/verbs/verbs_transport.h"
#endif

namespace rekindle::bench {

#if REKINDLE_WITH_VERBS
namespace {

using namespace transport::verbs;

constexpr auto kRegistrationTime = std::chrono::minutes(2);
constexpr auto kAnswerTime = std::chrono::seconds(10);
constexpr std::uint32_t kRequestBytes = 1 << 20;
constexpr std::size_t kOpenRequests = 32;  // per rail: the engine's window of one source
constexpr std::uint32_t kMaxMessageBytes = 1 << 20;

Result<std::unique_ptr<Fabric>> open_fabric(Api& api, const FabricOptions& options) {
  TRY(auto fabric, Fabric::open(api, options));
  const auto& rails = fabric->rails();
  const bool up = std::any_of(rails.begin(), rails.end(),
                              [](const auto& rail) { return Rail::is_up(rail->epoch()); });
  if (up) return fabric;
  return fail(ErrorCode::kUnavailable, "no RDMA port is up{}; `rekindle topo` shows more",
              rails.empty() ? ": " + fabric->why_empty() : "");
}

bool send_message(int socket, std::string_view bytes) {
  const auto size = static_cast<std::uint32_t>(bytes.size());
  return ::send(socket, &size, sizeof size, MSG_NOSIGNAL) == sizeof size &&
         ::send(socket, bytes.data(), size, MSG_NOSIGNAL) == static_cast<ssize_t>(size);
}

std::optional<std::string> receive_message(int socket) {
  std::uint32_t size = 0;
  if (::recv(socket, &size, sizeof size, MSG_WAITALL) != sizeof size || size > kMaxMessageBytes) {
    return std::nullopt;
  }
  std::string bytes(size, '\0');
  if (::recv(socket, bytes.data(), size, MSG_WAITALL) != static_cast<ssize_t>(size)) {
    return std::nullopt;
  }
  return bytes;
}

Result<std::string> ask(const SourceProcess& source, std::string_view request) {
  if (!send_message(source.handshake_socket(), request)) {
    return fail(ErrorCode::kPeerLost, "the source process is gone");
  }
  pollfd entry{source.handshake_socket(), POLLIN, 0};
  const auto patience = std::chrono::milliseconds(kAnswerTime).count();
  if (::poll(&entry, 1, static_cast<int>(patience)) != 1) {
    return fail(ErrorCode::kTimeout, "the source process does not answer a handshake");
  }
  auto answer = receive_message(source.handshake_socket());
  if (!answer || answer->empty())
    return fail(ErrorCode::kPeerLost, "the source process ended during a handshake");
  if (answer->front() != '+') return fail(ErrorCode::kUnavailable, "{}", answer->substr(1));
  return answer->substr(1);
}

class VerbsSourceImpl final : public VerbsSource {
 public:
  VerbsSourceImpl(std::unique_ptr<Api> api, std::unique_ptr<Fabric> fabric,
                  transport::SegmentRegistry& registry, const Incarnation& incarnation)
      : api_(std::move(api)),
        fabric_(std::move(fabric)),
        registrar_(MemoryRegistrar::create(*fabric_, {})),
        server_(VerbsServer::create(
            *fabric_, *registrar_, registry, incarnation,
            {.max_queue_pairs = kMaxQueuePairs, .registration_patience = kRegistrationTime})) {}
  transport::Server& server() override { return *server_; }

 private:
  const std::unique_ptr<Api> api_;
  const std::unique_ptr<Fabric> fabric_;
  const std::unique_ptr<MemoryRegistrar> registrar_;
  const std::unique_ptr<VerbsServer> server_;
};

// One rail pair with plain queue pairs.
struct PlainLink {
  std::unique_ptr<Connection> connection;
  RemoteWindows windows;
};

class VerbsPullerImpl final : public VerbsPuller {
 public:
  VerbsPullerImpl(std::unique_ptr<Api> api, std::unique_ptr<Fabric> fabric, std::size_t queue_pairs)
      : queue_pairs_(queue_pairs),
        api_(std::move(api)),
        fabric_(std::move(fabric)),
        registrar_(MemoryRegistrar::create(*fabric_, {})),
        connector_(make_connector(*fabric_, *registrar_, {.queue_pairs = queue_pairs})) {}

  Result<void> use(const Pool& destination) {
    memory_ = registrar_->add(destination.bytes(), MemoryUse::kLand, -1, 0, nullptr);
    used_ = connector_->use_memory(destination.bytes(), nullptr);
    const TimePoint deadline = std::chrono::steady_clock::now() + kRegistrationTime;
    if (!memory_->wait_settled(deadline)) {
      return fail(ErrorCode::kTimeout, "the destination is not registered in time");
    }
    auto problems = memory_->problems();
    if (!problems.empty()) return fail(std::move(problems.front()));
    // The same bytes, once more, for the connector.
    const std::uint64_t all = 2 * destination.bytes().size() * fabric_->devices().size();
    while (registrar_->stats().bytes < all && std::chrono::steady_clock::now() < deadline) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return {};
  }

  Result<transport::Paths> connect(const SourceProcess& source) override {
    TRY(const auto handshake, connector_->begin(source.target(), {}));
    TRY(const std::string answer, ask(source, handshake->request()));
    return handshake->finish(answer);
  }
  Result<Measured> measure_reads(const Setup& setup, bool integrity) override;

 private:
  Result<std::vector<PlainLink>> connect_plain(const SourceProcess& source);
  Result<void> read(PlainLink& link, const Setup& setup, transport::RegionKey region,
                    std::atomic<std::uint64_t>& next, bool integrity);
  Result<void> post(PlainLink& link, std::size_t queue_pair, const Setup& setup,
                    transport::RegionKey region, std::uint64_t request);

  const std::size_t queue_pairs_;
  const std::unique_ptr<Api> api_;
  const std::unique_ptr<Fabric> fabric_;
  const std::unique_ptr<MemoryRegistrar> registrar_;
  const std::unique_ptr<transport::HandshakeConnector> connector_;
  std::shared_ptr<RegisteredMemory> memory_;
  std::shared_ptr<const void> used_;
};

Result<std::vector<PlainLink>> VerbsPullerImpl::connect_plain(const SourceProcess& source) {
  TRY(const auto endpoint, Endpoint::parse(source.target().endpoint));
  std::vector<RailInfo> local;
  for (const auto& rail : fabric_->rails()) {
    if (rail->state().up) local.push_back(rail_info(*rail));
  }
  TRY(const auto pairs, choose_rail_pairs(local, endpoint.rails));
  ConnectRequest request;
  request.source = source.target().incarnation;
  std::vector<PlainLink> links;
  for (const RailPair& pair : pairs) {
    Rail& rail = *fabric_->rails()[pair.local];
    TRY(auto connection, Connection::create(rail, {.queue_pairs = queue_pairs_}));
    request.links.push_back({rail_info(rail), pair.remote, connection->mtu_bytes(),
                             rail.device().limits().max_init_rd_atomic, connection->ends()});
    links.push_back({std::move(connection), {}});
  }
  TRY(const std::string answer, ask(source, request.to_bytes()));
  TRY(const auto response, ConnectResponse::parse(answer));
  for (std::size_t i = 0; i < links.size(); ++i) {
    const LinkResponse& link = response.links.at(i);
    if (!link.error.empty()) return fail(ErrorCode::kUnavailable, "{}", link.error);
    const auto remote = std::find_if(
        endpoint.rails.begin(), endpoint.rails.end(),
        [&](const RailInfo& info) { return info.index == request.links[i].source_rail; });
    TRY_VOID(links[i].connection->connect(
        {remote->address, link.mtu_bytes, link.rd_atomic, link.queue_pairs},
        ConnectionRole::kReads));
    TRY(links[i].windows, RemoteWindows::create(link.windows, response.stale,
                                                links[i].connection->queue_pair_count()));
  }
  return links;
}

Result<void> VerbsPullerImpl::post(PlainLink& link, std::size_t queue_pair, const Setup& setup,
                                   transport::RegionKey region, std::uint64_t request) {
  const std::uint64_t offset = request * kRequestBytes % setup.destination.bytes().size();
  const Piece* piece = memory_->find(link.connection->rail().device(), offset);
  const RemoteWindow& window = link.windows.at(region, offset);
  ibv_sge sge{piece->address + (offset - piece->offset), kRequestBytes, piece->lkey};
  ibv_send_wr wr{};
  wr.wr_id = request * kMaxQueuePairs + queue_pair;
  wr.opcode = IBV_WR_RDMA_READ;
  wr.send_flags = IBV_SEND_SIGNALED;
  wr.sg_list = &sge;
  wr.num_sge = 1;
  wr.wr.rdma.remote_addr = window.address + (offset - window.offset);
  wr.wr.rdma.rkey = window.key(queue_pair);
  ibv_send_wr* bad = nullptr;
  const int error = api_->post_send(link.connection->queue_pair(queue_pair), &wr, &bad);
  if (error == 0) return {};
  return fail(ErrorCode::kUnavailable, "post a plain read: {}", std::strerror(error));
}

Result<void> VerbsPullerImpl::read(PlainLink& link, const Setup& setup, transport::RegionKey region,
                                   std::atomic<std::uint64_t>& next, bool integrity) {
  const std::uint64_t requests = setup.total_bytes / kRequestBytes;
  const std::size_t queue_pairs = link.connection->queue_pair_count();
  std::size_t open = 0;
  const auto post_next = [&](std::size_t queue_pair) -> Result<void> {
    const std::uint64_t request = next++;
    if (request >= requests) return {};
    ++open;
    return post(link, queue_pair, setup, region, request);
  };
  for (std::size_t i = 0; i < kOpenRequests; ++i) TRY_VOID(post_next(i % queue_pairs));
  while (open > 0) {
    std::array<ibv_wc, kOpenRequests> completions;
    const auto poll = [&] {
      return api_->poll_cq(link.connection->cq(), static_cast<int>(completions.size()),
                           completions.data());
    };
    int count = poll();
    if (count == 0) {
      link.connection->arm();
      count = poll();
    }
    if (count == 0) {
      pollfd entry{link.connection->event_fd(), POLLIN, 0};
      if (::poll(&entry, 1, 10'000) != 1) {
        return fail(ErrorCode::kTimeout, "plain reads do not complete");
      }
      (void)link.connection->take_event();
    }
    for (int i = 0; i < count; ++i) {
      const ibv_wc& wc = completions[static_cast<std::size_t>(i)];
      if (wc.status != IBV_WC_SUCCESS) {
        return fail(ErrorCode::kUnavailable, "plain read: {}", ibv_wc_status_str(wc.status));
      }
      --open;
      TRY_VOID(post_next(wc.wr_id % kMaxQueuePairs));
      const std::uint64_t at =
          wc.wr_id / kMaxQueuePairs * kRequestBytes % setup.destination.bytes().size();
      if (integrity && !verify_slice(setup.destination.bytes(), at, kRequestBytes, setup.digests)) {
        return fail(ErrorCode::kCorrupt, "plain reads brought wrong bytes");
      }
    }
  }
  return {};
}

Result<Measured> VerbsPullerImpl::measure_reads(const Setup& setup, bool integrity) {
  struct Job {
    PlainLink link;
    transport::RegionKey region;
  };
  std::vector<Job> jobs;
  for (const auto& source : setup.sources) {
    TRY(auto links, connect_plain(*source));
    for (auto& link : links) jobs.push_back({std::move(link), source->region()});
  }
  std::atomic<std::uint64_t> next = 0;
  std::mutex mutex;
  std::optional<Error> problem;  // guarded by mutex
  const double cpu_before = cpu_seconds(setup);
  const TimePoint start = std::chrono::steady_clock::now();
  std::vector<std::thread> threads;
  for (auto& job : jobs) {
    threads.emplace_back([&] {
      auto done = read(job.link, setup, job.region, next, integrity);
      if (done) return;
      const std::lock_guard lock(mutex);
      problem = std::move(done).error();
    });
  }
  for (auto& thread : threads) thread.join();
  const TimePoint end = std::chrono::steady_clock::now();
  if (problem) return fail(std::move(*problem));
  return Measured{.wall_seconds = seconds(end - start),
                  .cpu_seconds = cpu_seconds(setup) - cpu_before,
                  .slice_seconds = {}};
}

}  // namespace

Result<std::unique_ptr<VerbsSource>> VerbsSource::create(const FabricOptions& options,
                                                         transport::SegmentRegistry& registry,
                                                         const Incarnation& incarnation) {
  auto api = make_system_api();
  TRY(auto fabric, open_fabric(*api, options));
  return std::make_unique<VerbsSourceImpl>(std::move(api), std::move(fabric), registry,
                                           incarnation);
}

void answer_handshakes(transport::Server& server, const SessionToken& token, int socket) {
  while (const auto request = receive_message(socket)) {
    const auto answer = server.accept(token, *request);
    if (!send_message(socket, answer ? "+" + *answer : "-" + answer.error().message())) return;
  }
}

Result<std::unique_ptr<VerbsPuller>> VerbsPuller::create(const FabricOptions& options,
                                                         const Pool& destination,
                                                         std::size_t queue_pairs) {
  auto api = make_system_api();
  TRY(auto fabric, open_fabric(*api, options));
  auto puller = std::make_unique<VerbsPullerImpl>(std::move(api), std::move(fabric), queue_pairs);
  TRY_VOID(puller->use(destination));
  return puller;
}

Result<Measured> measure_plain_reads(const Setup& setup, bool integrity) {
  return setup.verbs->measure_reads(setup, integrity);
}

#else

namespace {

Error not_here() { return {ErrorCode::kUnavailable, "this build has no RDMA backend"}; }

}  // namespace

Result<std::unique_ptr<VerbsSource>> VerbsSource::create(const transport::verbs::FabricOptions&,
                                                         transport::SegmentRegistry&,
                                                         const Incarnation&) {
  return fail(not_here());
}
void answer_handshakes(transport::Server&, const SessionToken&, int) {}
Result<std::unique_ptr<VerbsPuller>> VerbsPuller::create(const transport::verbs::FabricOptions&,
                                                         const Pool&, std::size_t) {
  return fail(not_here());
}
Result<Measured> measure_plain_reads(const Setup&, bool) { return fail(not_here()); }

#endif

}  // namespace rekindle::bench
