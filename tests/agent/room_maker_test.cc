#include "recovery/agent/room_maker.h"

#include <future>
#include <stdexcept>

#include <boost/asio/co_spawn.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/use_future.hpp>
#include <gtest/gtest.h>

#include "tests/support/process.h"

namespace rekindle::agent {
namespace {

using testing::TempDir;

// One caller at a time: the turn of one whose call throws is over, too.
TEST(RoomMaker, B8ACallThatThrowsDoesNotHoldUpTheNextOne) {
  TempDir dir{true};
  const auto store = store::SegmentStore::open({dir / "store", 1 << 20});
  ASSERT_TRUE(store) << store.error().message();
  boost::asio::io_context context;
  const auto executor = context.get_executor();
  const rpc::Identity identity;
  GrantClock grant_clock;
  WorkerPool pool("t-blocking", 1, 16);
  transport::SegmentRegistry registry;
  ServedVersions served(registry);
  CoordinatorLink link(executor, identity, grant_clock, "");
  VersionReaders readers;
  RoomMaker maker(executor, {identity, **store, pool, pool, registry, served, link, readers}, {});
  const auto make = [&](RoomMaker::MissingBytes missing) {
    auto made = boost::asio::co_spawn(context, maker.make({"m", 2}, std::move(missing)),
                                      boost::asio::use_future);
    context.restart();
    context.run_for(std::chrono::seconds(10));
    EXPECT_EQ(made.wait_for(std::chrono::seconds(0)), std::future_status::ready);
    return made;
  };
  auto first = make([]() -> std::uint64_t { throw std::bad_alloc(); });
  EXPECT_THROW((void)first.get(), std::bad_alloc);
  auto second = make([] { return std::uint64_t{0}; });
  EXPECT_TRUE(second.get());
}

}  // namespace
}  // namespace rekindle::agent
