#include "recovery/agent/fleet_bench.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include <sys/mman.h>
#include <unistd.h>

#include <boost/asio/this_coro.hpp>

#include "recovery/agent/local_interface.h"
#include "recovery/agent/timed_read.h"
#include "recovery/pull/path_opener.h"
#include "recovery/rpc/convert.h"
#include "src/async/offload.h"
#include "src/base/log.h"
#include "src/base/unique_fd.h"
#include "src/base/units.h"
#include "transport/link_cuts.h"

namespace rekindle::agent {

using async::Task;

namespace {

constexpr std::uint64_t kLentBytes = 64 * kMiB;
// Sessions at once. In a benchmark each host is read by one other at a time; the rest is for those
// that are just ending.
constexpr long kMostReaders = 4;
// Room for the window of all streams, or for those of eight NICs.
constexpr std::uint64_t kScratchBytes = 64 * kMiB;
constexpr std::uint64_t kRailScratchBytes = 128 * kMiB;
// The idle timeout of a control connection is twice as long.
constexpr std::uint32_t kLongestReadMs = 30'000;
constexpr std::chrono::milliseconds kSourceDialDeadline{2000};
// The source has to allocate the memory that it lends.
constexpr std::chrono::milliseconds kBenchSessionDeadline{3000};
constexpr std::chrono::milliseconds kConnectPatience{4000};
// No page of it is a hole.
constexpr int kFill = 0x5a;

void add_path(const TimedRead::PathFigure& figure, proto::BenchReading& reading) {
  auto& path = *reading.add_paths();
  path.set_rail(figure.path.home);
  if (!figure.path.home.empty())
    path.set_source_rail(transport::peer_rail_of(figure.path.description));
  path.set_description(figure.path.description);
  path.set_bytes(figure.bytes);
  path.set_broken(figure.broken);
}

}  // namespace

// Memory in a file without a name, with all its pages.
class FleetBench::Memory {
 public:
  // Blocks.
  static Result<std::shared_ptr<Memory>> create(std::uint64_t bytes) {
    UniqueFd fd(::memfd_create("rekindle-bench", MFD_CLOEXEC));
    const bool sized =
        static_cast<bool>(fd) && ::fallocate(fd.get(), 0, 0, static_cast<off_t>(bytes)) == 0;
    void* const data = sized
                           ? ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0)
                           : MAP_FAILED;
    if (data == MAP_FAILED) {
      return fail(ErrorCode::kExhausted, "{} of memory for a benchmark: {}", format_bytes(bytes),
                  std::strerror(errno));
    }
    std::memset(data, kFill, bytes);
    return std::make_shared<Memory>(std::move(fd), static_cast<std::byte*>(data), bytes);
  }
  Memory(UniqueFd fd, std::byte* data, std::uint64_t bytes)
      : fd_(std::move(fd)), data_(data), bytes_(bytes) {}
  ~Memory() { ::munmap(data_, bytes_); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  std::span<std::byte> bytes() const { return {data_, bytes_}; }
  int fd() const { return fd_.get(); }

 private:
  const UniqueFd fd_;
  std::byte* const data_;
  const std::uint64_t bytes_;
};

// Memory that is registered for readers.
class FleetBench::Lent {
 public:
  Lent(const std::shared_ptr<transport::SegmentRegistry>& registry,
       const std::shared_ptr<Memory>& memory)
      : registry_(registry), key_(registry->add(memory->bytes(), memory->fd(), 0, {}, memory)) {}
  ~Lent() {
    if (const auto registry = registry_.lock()) registry->remove(key_);
  }
  Lent(const Lent&) = delete;
  Lent& operator=(const Lent&) = delete;

  transport::RegionKey key() const { return key_; }

 private:
  // A session that outlives the benchmark finds no registry.
  const std::weak_ptr<transport::SegmentRegistry> registry_;
  const transport::RegionKey key_;
};

FleetBench::FleetBench(const pull::PullEnvironment& environment, PeerSessions& sessions,
                       transport::SegmentRegistry& registry, const Rdma* rdma)
    : environment_(environment),
      sessions_(sessions),
      registry_(&registry, [](transport::SegmentRegistry*) {}),
      rdma_(rdma) {}

Task<Result<proto::DrillResponse>> FleetBench::answer(rpc::Peer peer, proto::DrillRequest request) {
  proto::DrillResponse response;
  response.set_pid(static_cast<std::uint32_t>(::getpid()));
  if (request.dry_run()) co_return response;
  if (request.has_open_bench()) {
    auto opening = open(std::move(peer), std::move(*request.mutable_open_bench()));
    co_return co_await std::move(opening);
  }
  const std::string source = request.bench_read().source().node_id();
  log::info("bench.read", "source", source, "asked_by", peer.node_id);
  auto reading = read(std::move(*request.mutable_bench_read()));
  CO_TRY(*response.mutable_bench_reading(), co_await std::move(reading));
  log::info("bench.has_read", "source", source, "bytes", response.bench_reading().bytes());
  co_return response;
}

Task<Result<proto::DrillResponse>> FleetBench::open(rpc::Peer peer,
                                                    proto::DrillRequest::OpenBench request) {
  CO_TRY_VOID(sessions_.check_room(peer));
  // Pullers need the other places.
  if (lent_.use_count() >= kMostReaders) {
    co_return fail(ErrorCode::kExhausted,
                   "{} is read for {} benchmarks already: wait for their end",
                   environment_.self.node_id(), kMostReaders);
  }
  std::shared_ptr<const Lent> lent = lent_.lock();
  if (lent == nullptr) {
    auto allocate = [] { return Memory::create(kLentBytes); };
    auto allocating = async::offload(*environment_.blocking_pool, std::move(allocate));
    CO_TRY(const auto memory, co_await std::move(allocating));
    // Another call may have come first.
    lent = lent_.lock();
    if (lent == nullptr) lent = std::make_shared<const Lent>(registry_, memory);
    lent_ = lent;
  }
  // Nobody would end a session that opens after its connection has ended.
  const bool cancelled = co_await async::is_cancelled();
  if (cancelled) co_return fail(ErrorCode::kUnavailable, "cancelled");
  const std::vector<std::string> transports(request.transports().begin(),
                                            request.transports().end());
  proto::DrillResponse response;
  CO_TRY(*response.mutable_opened(),
         sessions_.open_readable(peer, {lent->key(), kLentBytes, lent}, transports));
  co_return response;
}

Task<Result<proto::BenchReading>> FleetBench::read(proto::DrillRequest::BenchRead request) {
  co_await boost::asio::this_coro::throw_if_cancelled(false);
  const std::string& transport = request.transport();
  if (request.milliseconds() == 0 || request.milliseconds() > kLongestReadMs) {
    co_return fail(ErrorCode::kInvalid, "a read of a benchmark lasts 1 to {} ms", kLongestReadMs);
  }
  if (!transport.empty() && transport != "tcp" && transport != "verbs") {
    co_return fail(ErrorCode::kInvalid, "'{}' is no transport between hosts: tcp or verbs",
                   transport);
  }
  if (std::exchange(reading_, true)) {
    co_return fail(ErrorCode::kExhausted, "{} reads for a benchmark already: wait until it ends",
                   environment_.self.node_id());
  }
  // Also after an exception.
  const auto done = [](bool* reading) { *reading = false; };
  const std::unique_ptr<bool, decltype(done)> ends(&reading_, done);
  const std::chrono::milliseconds time(request.milliseconds());
  auto reading = read_from(std::move(*request.mutable_source()), time,
                           std::move(*request.mutable_transport()));
  co_return co_await std::move(reading);
}

// Whatever happens, the connection to the source is closed, and the session there ends with it.
Task<Result<proto::BenchReading>> FleetBench::read_from(proto::NodeAddress node,
                                                        std::chrono::milliseconds time,
                                                        std::string transport) {
  pull::ActiveSource source;
  source.name = node.node_id();
  *source.record.mutable_node() = std::move(node);
  auto dialling =
      pull::SourcePeer::connect(source.record, environment_.identity, kSourceDialDeadline);
  CO_TRY(source.peer, co_await std::move(dialling));
  auto reading = read_over(source, time, std::move(transport));
  auto outcome = co_await std::move(reading);
  if (source.session) {
    co_await pull::SourcePeer::close_session(source.peer, source.session->token);
  }
  source.peer->close();
  co_return outcome;
}

Task<Result<proto::BenchReading>> FleetBench::read_over(pull::ActiveSource& source,
                                                        std::chrono::milliseconds time,
                                                        std::string transport) {
  // Never shared memory: what counts is the network.
  auto transports = pull::transports_for({.forced = transport}, environment_.handshakes);
  const bool over_rails = std::ranges::find(transports, "verbs") != transports.end();
  auto opening = source.peer->open_bench_session(std::move(transports), kBenchSessionDeadline);
  CO_TRY(auto opened, co_await std::move(opening));
  source.session = std::move(opened.session);
  if (opened.bytes < TimedRead::kSliceBytes) {
    co_return fail(ErrorCode::kInvalid, "{} lends {} to benchmarks, too little", source.name,
                   format_bytes(opened.bytes));
  }
  auto allocate = [bytes = over_rails ? kRailScratchBytes : kScratchBytes] {
    return Memory::create(bytes);
  };
  auto allocating = async::offload(*environment_.blocking_pool, std::move(allocate));
  CO_TRY(const auto scratch, co_await std::move(allocating));
  proto::BenchReading reading;
  // Registrations of the scratch memory. They end after the paths and before the memory.
  std::vector<std::shared_ptr<const void>> used;
  pull::Silence silence(kConnectPatience, steady_now());
  pull::PathOpener opener(environment_, silence,
                          {.id = {},
                           .root = {},
                           .forced_transport = transport,
                           .note = [&reading](std::string note) { reading.add_notes(note); },
                           .first_failure_of = [](const std::string&) { return true; },
                           .use_memory =
                               [&](transport::HandshakeConnector& connector) {
                                 used.push_back(connector.use_memory(scratch->bytes(), nullptr));
                               }});
  CO_TRY(auto paths, co_await opener.open_paths(source));
  TimedRead timed(environment_.executor, *environment_.engine,
                  {.scratch = scratch->bytes(),
                   .region = paths.regions.front(),
                   .region_bytes = opened.bytes,
                   .time = time});
  auto running = timed.run(std::move(paths.paths));
  const TimedRead::Figures figures = co_await std::move(running);
  reading.set_transport(source.transport);
  reading.set_max_bytes_per_second(source.session->max_bytes_per_second);
  reading.set_bytes(figures.bytes);
  reading.set_elapsed_us(static_cast<std::uint64_t>(
      std::chrono::duration_cast<std::chrono::microseconds>(figures.elapsed).count()));
  for (const auto& path : figures.paths) add_path(path, reading);
  if (figures.why) *reading.mutable_why() = rpc::to_status(*figures.why);
  if (source.transport.starts_with("tcp")) {
    const auto offer =
        std::ranges::find(source.session->offers, "tcp", &pull::PeerSession::Offer::transport);
    auto look = [endpoint = offer->endpoint] { return interface_towards(endpoint); };
    auto looking = async::offload(*environment_.blocking_pool, std::move(look));
    const LocalInterface interface = co_await std::move(looking);
    reading.set_interface(interface.name);
    reading.set_interface_bytes_per_second(interface.bytes_per_second);
  }
  if (rdma_ == nullptr) co_return reading;
  for (const auto& view : rdma_->rails()) {
    auto& rail = *reading.add_rails();
    rail.set_name(view.name);
    rail.set_why_down(view.why_down);
    rail.set_link_bytes_per_second(view.bytes_per_second);
  }
  co_return reading;
}

}  // namespace rekindle::agent
