// page_crowd ADDRESS HOSTS [NAME TEXT]
//
// Plays HOSTS agents in racks of 40 to a coordinator: they register, announce a copy and send
// heartbeats. One more is called NAME, and has TEXT for its rack and in its events.
// Prints "joined" when all have. Ends with its stdin.
#include <cstdio>
#include <string>

#include <unistd.h>

#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/posix/stream_descriptor.hpp>
#include <fmt/format.h>

#include "proto/coordinator.pb.h"
#include "recovery/rpc/convert.h"
#include "recovery/rpc/methods.h"
#include "src/async/task.h"

namespace rekindle {
namespace {

using namespace std::chrono_literals;

constexpr std::size_t kRackSize = 40;
constexpr std::uint64_t kBytes = std::uint64_t{7} << 30;

struct Crowd {
  std::string address;
  std::size_t wanted = 0;
  std::size_t joined = 0;
};

// Of one agent of the crowd.
struct Played {
  std::string name;
  std::string rack;
  // The texts of its events; "": it tells none.
  std::string says;
  rpc::Identity identity;
  std::shared_ptr<rpc::RpcClient> client;
};

async::Task<Result<void>> join(const std::string& address, Played& played) {
  CO_TRY(played.client, co_await rpc::RpcClient::connect(address, played.identity, 30s));
  proto::RegisterRequest enroll;
  auto& node = *enroll.mutable_node();
  node.set_node_id(played.name);
  node.set_incarnation(played.identity.incarnation.to_bytes());
  node.set_control_endpoint("10.0.0.1:7400");
  enroll.set_failure_domain(played.rack);
  CO_TRY(const auto registered,
         co_await rpc::call<proto::COORDINATOR_REGISTER>(played.client, std::move(enroll), 30s));
  (void)registered;
  proto::AnnounceRequest announce;
  announce.set_node_id(played.name);
  announce.set_incarnation(played.identity.incarnation.to_bytes());
  announce.set_full(true);
  auto& holding = *announce.add_add();
  *holding.mutable_id() = rpc::to_proto(ModelVersion{"qwen3", 41});
  *holding.mutable_root() = rpc::to_proto(Digest{1, 2});
  *holding.mutable_layout() = rpc::to_proto(Digest{3, 4});
  holding.set_payload_bytes(kBytes);
  holding.set_checkpoint_bytes(kBytes);
  holding.set_complete(true);
  holding.set_whole(true);
  holding.set_verified(true);
  CO_TRY(const auto announced,
         co_await rpc::call<proto::COORDINATOR_ANNOUNCE>(played.client, std::move(announce), 30s));
  (void)announced;
  co_return Result<void>();
}

proto::HeartbeatRequest heartbeat_of(const Played& played) {
  proto::HeartbeatRequest request;
  request.set_node_id(played.name);
  request.set_incarnation(played.identity.incarnation.to_bytes());
  request.set_store_free_bytes(kBytes);
  if (played.says.empty()) return request;
  auto& event = *request.add_events();
  event.set_number(1);
  event.set_unix_us(1'700'000'000'000'000);
  event.set_kind("committed");
  event.set_instance(played.says);
  event.set_rank(0);
  event.set_why(played.says);
  event.set_rung(played.says);
  auto& phase = *event.add_phases();
  phase.set_name(played.says);
  phase.set_elapsed_us(1000);
  return request;
}

async::Task<void> play(Played played, Crowd& crowd) {
  played.identity = rpc::make_identity(proto::ROLE_AGENT, played.name);
  const auto joined = co_await join(crowd.address, played);
  if (!joined) {
    fmt::print(stderr, "{}: {}\n", played.name, joined.error().message());
    co_return;
  }
  if (++crowd.joined == crowd.wanted) {
    fmt::print("joined\n");
    std::fflush(stdout);
  }
  for (;;) {
    proto::HeartbeatRequest request = heartbeat_of(played);
    const auto answer =
        co_await rpc::call<proto::COORDINATOR_HEARTBEAT>(played.client, std::move(request), 2s);
    if (!answer) fmt::print(stderr, "{}: {}\n", played.name, answer.error().message());
    co_await async::sleep_for(250ms);
  }
}

int run(Crowd crowd, std::size_t hosts, const std::string& name, const std::string& text) {
  boost::asio::io_context io(1);
  crowd.wanted = hosts + (name.empty() ? 0 : 1);
  for (std::size_t i = 0; i < hosts; ++i) {
    Played played;
    played.name = fmt::format("host-{:04}", i);
    played.rack = fmt::format("r{:02}", i / kRackSize);
    boost::asio::co_spawn(io, play(std::move(played), crowd), boost::asio::detached);
  }
  if (!name.empty()) {
    Played played;
    played.name = name;
    played.rack = played.says = text;
    boost::asio::co_spawn(io, play(std::move(played), crowd), boost::asio::detached);
  }
  boost::asio::posix::stream_descriptor input(io, ::dup(STDIN_FILENO));
  char byte = 0;
  input.async_read_some(boost::asio::buffer(&byte, 1),
                        [&io](boost::system::error_code, std::size_t) { io.stop(); });
  io.run();
  return 0;
}

}  // namespace
}  // namespace rekindle

int main(int argc, char** argv) {
  if (argc < 3) return 2;
  rekindle::Crowd crowd;
  crowd.address = argv[1];
  return rekindle::run(crowd, std::stoul(argv[2]), argc > 4 ? argv[3] : "",
                       argc > 4 ? argv[4] : "");
}
