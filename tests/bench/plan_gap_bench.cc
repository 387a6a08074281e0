// Eight ranks of a Kimi-K2-sized model begin to pull at once on one agent's control thread. Prints
// how long that thread was busy without a pause, which is how late a heartbeat can be:
//   plan_gap_bench [--ranks N]
// A child process serves the metadata of a copy (about 139,000 tensors) and none of its bytes. The
// ranks resolve, fetch the metadata, apply the shard spec and plan, and stop before the transfer.
#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <sys/prctl.h>
#include <unistd.h>

#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/io_context.hpp>
#include <fmt/format.h>

#include "proto/agent.pb.h"
#include "recovery/planner/shard_spec.h"
#include "recovery/pull/pull_job.h"
#include "recovery/pull/pull_plans.h"
#include "recovery/rpc/convert.h"
#include "recovery/rpc/methods.h"
#include "src/base/units.h"
#include "src/tensor/checkpoint.h"
#include "tests/planner/model_tensors.h"
#include "tests/store/store_fixture.h"

namespace rekindle::pull {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kBeat{5};
constexpr milliseconds kIdleTime{2000};
constexpr std::uint64_t kPageBytes = kMiB;
constexpr std::uint64_t kSegmentBytes = 5 * kGiB;

template <typename T>
T check(Result<T> result) {
  if (result) return std::move(*result);
  fmt::print(stderr, "plan_gap_bench: {}\n", result.error().message());
  std::exit(1);
}

std::shared_ptr<const Checkpoint> make_checkpoint(const std::string& config) {
  const std::string file = std::string(kFileTensorPrefix) + "config.json";
  auto infos = planner::testing::model_tensors(config);
  infos.push_back({file, DType::kU8, {config.size()}});
  TensorSet tensors = check(TensorSet::create(std::move(infos)));
  const TileMap tiles = check(TileMap::create(tensors));
  std::vector<Digest> leaves(tiles.tile_count());
  for (std::size_t i = 0; i < leaves.size(); ++i) std::memcpy(leaves[i].bytes.data(), &i, sizeof i);
  const TensorIndex index = *tensors.find(file);
  const Box whole = Box::whole(tensors[index].shape);
  leaves[tiles.first_tile(index)] =
      digest_tile(tensors[index], tiles.grid(index), 0, std::as_bytes(std::span(config)), whole);
  const ModelVersion id{"kimi-k2", 1};
  const Digest root = checkpoint_root(id, tensors, tiles, leaves);
  return check(Checkpoint::create(id, std::move(tensors), std::move(leaves), root));
}

// Answers like an agent that holds a whole copy, from bytes that are made beforehand.
class MetadataServer {
 public:
  MetadataServer() {
    const std::string config = planner::testing::kimi_k2_config();
    const auto checkpoint = make_checkpoint(config);
    const Layout layout =
        check(pack_layout(checkpoint->tensors, planner::whole_boxes(checkpoint->tensors),
                          kSegmentBytes))
            .layout;
    const auto leaves = std::as_bytes(std::span(checkpoint->tile_digests));
    pages_[proto::PAGE_TENSOR_SET] = checkpoint->tensors.serialize();
    pages_[proto::PAGE_LAYOUT] = layout.serialize();
    pages_[proto::PAGE_TILE_DIGESTS].assign(reinterpret_cast<const char*>(leaves.data()),
                                            leaves.size());
    pages_[proto::PAGE_FILE] = config;
    *found_.mutable_id() = rpc::to_proto(checkpoint->id);
    *found_.mutable_root() = rpc::to_proto(checkpoint->root);
    *found_.mutable_tensor_set() = rpc::to_proto(checkpoint->tensors.digest());
    found_.set_checkpoint_bytes(checkpoint->tensors.total_bytes());
    proto::Source& source = *found_.add_sources();
    source.mutable_node()->set_node_id("source");
    source.mutable_node()->set_incarnation(identity_.incarnation.to_bytes());
    *source.mutable_layout() = rpc::to_proto(layout.digest());
    source.set_complete(true);
    source.set_payload_bytes(layout.payload_bytes());
  }

  // Writes its address to `out` and serves until it is killed.
  void run(int out) {
    server_->handle_at_once(proto::AGENT_OPEN_DIRECT,
                            [this](const rpc::Peer&, const std::string&) -> Result<std::string> {
                              return found_.SerializeAsString();
                            });
    server_->handle_at_once(
        proto::AGENT_GET_PAGE,
        [this](const rpc::Peer&, const std::string& body) -> Result<std::string> {
          TRY(const auto request, rpc::parse_body<proto::GetPageRequest>(body));
          const std::string& bytes = pages_[request.kind()];
          proto::GetPageResponse page;
          page.set_total_bytes(bytes.size());
          page.set_data(bytes.substr(std::min(request.offset(), bytes.size()), kPageBytes));
          return page.SerializeAsString();
        });
    const std::string address = check(server_->listen("127.0.0.1:0"));
    if (::write(out, address.data(), address.size()) < 0) std::exit(1);
    ::close(out);
    io_.run();
  }

 private:
  boost::asio::io_context io_;
  const rpc::Identity identity_ = rpc::make_identity(proto::ROLE_AGENT, "source");
  std::unique_ptr<rpc::RpcServer> server_ = rpc::RpcServer::create(io_.get_executor(), identity_);
  std::map<int, std::string> pages_;
  proto::OpenDirectResponse found_;
};

// Returns the address of a server in a child process that ends with this one.
std::string start_server() {
  int ends[2];
  if (::pipe(ends) != 0) std::exit(1);
  if (::fork() == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    ::close(ends[0]);
    MetadataServer().run(ends[1]);
    std::exit(0);
  }
  ::close(ends[1]);
  char address[64] = {};
  if (::read(ends[0], address, sizeof address - 1) <= 0) std::exit(1);
  ::close(ends[0]);
  return address;
}

// Wakes up every few milliseconds and notes how late that was.
class Heart {
 public:
  async::Task<void> beat() {
    last_ = steady_now();
    last_cpu_ = cpu_time();
    while (!stopped_) {
      co_await async::sleep_for(kBeat);
      const TimePoint now = steady_now();
      const Duration gap = now - std::exchange(last_, now);
      largest_ = std::max(largest_, gap);
      const Duration cpu = cpu_time();
      largest_cpu_ = std::max(largest_cpu_, cpu - std::exchange(last_cpu_, cpu));
      if (gap > milliseconds(100)) ++late_;
    }
  }
  void stop() { stopped_ = true; }
  void print(const char* what, Duration elapsed) const {
    const auto ms = [](Duration time) {
      return std::chrono::duration<double, std::milli>(time).count();
    };
    fmt::print(
        "{:28} largest gap {:7.1f} ms, {:7.1f} ms of them on the CPU, {} above 100 ms, in "
        "{:.2f} s\n",
        what, ms(largest_), ms(largest_cpu_), late_, ms(elapsed) / 1000);
  }

 private:
  // Of the control thread. Where others use the machine, the rest of a gap is not its work.
  static Duration cpu_time() {
    timespec now{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return std::chrono::seconds(now.tv_sec) + std::chrono::nanoseconds(now.tv_nsec);
  }

  TimePoint last_{};
  Duration last_cpu_{};
  Duration largest_{};
  Duration largest_cpu_{};
  int late_ = 0;
  bool stopped_ = false;
};

struct Bench {
  store::TempDirectory directory;
  std::unique_ptr<store::SegmentStore> store = store::open_store(directory.path());
  boost::asio::io_context io;
  WorkerPool digests{"rk-digest", 1, 8192};
  WorkerPool blocking{"rk-blocking", 4, 256};
  // As on a host that has the memory for such a model.
  PullPlans plans{io.get_executor(), {PullPlans::for_this_host().threads, kGiB, 256}};
  PullEnvironment environment;

  Bench() {
    environment.executor = io.get_executor();
    environment.identity = rpc::make_identity(proto::ROLE_PULLER, "puller");
    environment.store = store.get();
    environment.digest_pool = &digests;
    environment.blocking_pool = &blocking;
    environment.plans = &plans;
    environment.coordinator = [] { return nullptr; };
    environment.coordinator_problem = [] { return Error(ErrorCode::kUnavailable, "nobody"); };
  }

  void idle() {
    Heart heart;
    const TimePoint begin = steady_now();
    boost::asio::co_spawn(io, heart.beat(), boost::asio::detached);
    boost::asio::co_spawn(
        io,
        [&]() -> async::Task<void> {
          co_await async::sleep_for(kIdleTime);
          heart.stop();
        },
        boost::asio::detached);
    run();
    heart.print("no rank plans", steady_now() - begin);
  }

  void plan(const std::string& from, int ranks, const char* what) {
    Heart heart;
    int running = ranks;
    const TimePoint begin = steady_now();
    boost::asio::co_spawn(io, heart.beat(), boost::asio::detached);
    for (int rank = 0; rank < ranks; ++rank) {
      boost::asio::co_spawn(
          io,
          [&, rank]() -> async::Task<void> {
            PullRequest request;
            request.ref = {"kimi-k2", 1};
            request.shard = fmt::format("tp={}/{}", rank, ranks);
            request.from = {from};
            PullJob job(environment, std::move(request), {});
            const auto plan = co_await job.plan_only();
            if (!plan) fmt::print("rank {}: {}\n", rank, plan.error().message());
            if (plan && (!plan->missing.empty() || plan->slices == 0)) std::exit(1);
            if (--running == 0) heart.stop();
          },
          boost::asio::detached);
    }
    run();
    heart.print(what, steady_now() - begin);
  }

 private:
  void run() {
    io.restart();
    io.run();
  }
};

}  // namespace
}  // namespace rekindle::pull

int main(int argc, char** argv) {
  int ranks = 8;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument == "--ranks" && i + 1 < argc) {
      ranks = std::max(1, std::atoi(argv[++i]));
    } else {
      fmt::print(stderr, "usage: plan_gap_bench [--ranks N]\n");
      return 2;
    }
  }
  const std::string from = rekindle::pull::start_server();
  rekindle::pull::Bench bench;
  bench.idle();
  bench.plan(from, ranks, fmt::format("{} ranks plan at once", ranks).c_str());
  bench.plan(from, ranks, fmt::format("the same {} ranks again", ranks).c_str());
  return 0;
}
