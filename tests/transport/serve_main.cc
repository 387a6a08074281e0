// A source in a process of its own, for tests that kill and freeze it.
//   test_serve tcp|shm SIZE TOKEN INCARNATION [PORT]
// Prints "region R G" and "endpoint E", then serves until it is killed.
#include <cstdio>
#include <cstdlib>
#include <string>

#include <unistd.h>

#include "tests/transport/transport_fixture.h"
#include "transport/shm/shm_transport.h"
#include "transport/tcp/tcp_transport.h"

namespace rekindle::transport {
namespace {

int serve(int argc, char** argv) {
  if (argc < 5) return 2;
  const std::string kind = argv[1];
  const testing::TestSegment segment(std::strtoull(argv[2], nullptr, 10));
  SessionToken token;
  Incarnation incarnation;
  if (!from_hex(argv[3], token.bytes.data(), token.bytes.size()) ||
      !from_hex(argv[4], incarnation.bytes.data(), incarnation.bytes.size())) {
    return 2;
  }
  SegmentRegistry registry;
  const RegionKey key = registry.add(segment.bytes(), segment.fd(), 0, {}, nullptr);
  registry.admit({.token = token, .puller = "test", .regions = {key}});
  std::unique_ptr<Server> server;
  if (kind == "tcp") {
    const auto port = static_cast<std::uint16_t>(argc > 5 ? std::atoi(argv[5]) : 0);
    auto made =
        tcp::TcpServer::create({.listen_host = "127.0.0.1", .port = port}, registry, incarnation);
    if (made) server = std::move(*made);
  } else {
    auto made = shm::ShmServer::create({}, registry, incarnation);
    if (made) server = std::move(*made);
  }
  if (!server) return 1;
  std::printf("region %u %u\nendpoint %s\n", key.region, key.generation,
              server->endpoint("127.0.0.1").c_str());
  std::fflush(stdout);
  while (true) ::pause();
}

}  // namespace
}  // namespace rekindle::transport

int main(int argc, char** argv) { return rekindle::transport::serve(argc, argv); }
