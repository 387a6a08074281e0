#include "recovery/coordinator/committer.h"

#include <stdexcept>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "src/async/task_group.h"
#include "tests/recovery/rpc_fixture.h"

namespace rekindle::coordinator {
namespace {

using namespace std::chrono_literals;
using ::testing::HasSubstr;

class ThrowingStore : public DurableStore {
 public:
  std::string place() const override { return "a store that throws"; }
  Result<Records> load() override { return Records{}; }
  Result<void> write(const std::vector<RecordWrite>&) override {
    throw std::runtime_error("an answer that nobody understands");
  }
};

TEST(CoordinatorCommitter, AnExceptionOfTheStoreFailsAllThatWaitAndEndsTheTerm) {
  rpc::testing::Loop loop;
  boost::asio::thread_pool thread(1);
  ThrowingStore store;
  auto records = StateRecords::parse({});
  ASSERT_TRUE(records);
  Core core({}, {}, {}, [] { return PullId::random(); });
  std::optional<Error> lost;
  Committer committer(loop.executor(), thread, core, *std::move(records), store,
                      [&](const Error& error) { lost = error; });
  async::TaskGroup tasks(loop.executor());
  tasks.spawn("commit", committer.run());
  const auto first = loop.run(committer.wait(core.start(TimePoint{1h})));
  ASSERT_FALSE(first);
  EXPECT_EQ(first.error().code(), ErrorCode::kInternal);
  EXPECT_THAT(first.error().message(), HasSubstr("an answer that nobody understands"));
  ASSERT_TRUE(lost);
  EXPECT_EQ(lost->code(), ErrorCode::kInternal);
  const auto later = loop.run(committer.wait(core.start(TimePoint{1h})));
  ASSERT_FALSE(later) << "who comes later waits for nothing";
  EXPECT_EQ(later.error().code(), ErrorCode::kInternal);
  EXPECT_TRUE(loop.run(tasks.close(5s)));
}

}  // namespace
}  // namespace rekindle::coordinator
