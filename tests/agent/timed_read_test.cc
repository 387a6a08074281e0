// A read for a benchmark that goes before its end.
#include "recovery/agent/timed_read.h"

#include <thread>
#include <vector>

#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/io_context.hpp>
#include <gtest/gtest.h>

#include "tests/transport/fake/fake_transport.h"
#include "tests/transport/transport_fixture.h"

namespace rekindle::agent {
namespace {

using namespace std::chrono_literals;

// Slices land until the batch is gone.
TEST(TimedReadTest, ItMayGoWhileSlicesLand) {
  const auto engine = transport::Engine::create({.poller_threads = 1});
  const transport::testing::TestSegment segment(TimedRead::kSliceBytes);
  transport::fake::FakePeer peer;
  const auto key = peer.add_region(segment.bytes());
  const auto token = peer.admit({key});
  std::vector<std::byte> scratch(8 * TimedRead::kSliceBytes);
  for (int turn = 0; turn < 20; ++turn) {
    boost::asio::io_context io;
    TimedRead read(
        io.get_executor(), *engine,
        {.scratch = scratch, .region = key, .region_bytes = TimedRead::kSliceBytes, .time = 30s});
    auto path = peer.connect(token);
    ASSERT_TRUE(path) << path.error().message();
    transport::Paths paths;
    paths.push_back(std::move(*path));
    const std::uint64_t before = peer.bytes_served();
    boost::asio::co_spawn(io, read.run(std::move(paths)), boost::asio::detached);
    (void)io.run_one();
    ASSERT_TRUE(transport::testing::eventually(
        [&] { return peer.bytes_served() > before + 4 * TimedRead::kSliceBytes; }));
  }
}

}  // namespace
}  // namespace rekindle::agent
