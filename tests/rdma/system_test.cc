// The whole system over verbs: coordinator, agents and pulls as real processes that are killed,
// frozen and restarted in the middle.
#include <csignal>
#include <filesystem>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/rdma/rdma_fleet.h"

namespace rekindle::testing {
namespace {

using ::testing::HasSubstr;

// 48 MiB take some seconds at these rates: time to break something.
const std::vector<std::string> kOneSlowly = {"--max-rate", "8MB"};
const std::vector<std::string> kEachOfTwoSlowly = {"--max-rate", "4MB"};

class RdmaSystem : public RdmaFleet {
 protected:
  void SetUp() override {
    mib_ = 48;
    RdmaFleet::SetUp();
  }
};

TEST_F(RdmaSystem, APullReadsEveryByteOverVerbs) {
  start_source("a");
  auto pull = start_pull("verbs");
  const auto answer = finish(*pull);
  ASSERT_NO_FATAL_FAILURE(expect_complete(answer));
  EXPECT_EQ(source_of(answer, "a")["transport"], "verbs") << answer.json;
  EXPECT_EQ(source_of(answer, "a")["bytes"], answer.json["bytes"]) << answer.json;
}

// Row 1.
TEST_F(RdmaSystem, Row1SourceKilledMidPullIsReplacedByTheOther) {
  start_source("a", kEachOfTwoSlowly);
  start_source("b", kEachOfTwoSlowly);
  auto pull = start_pull("verbs");
  ASSERT_TRUE(wait_for_bytes(*pull, 25)) << pull->err();
  fleet_.agent("a").process->kill();
  const auto answer = finish(*pull);
  ASSERT_NO_FATAL_FAILURE(expect_complete(answer));
  EXPECT_GT(source_of(answer, "a")["bytes"], 0) << answer.json;
  EXPECT_TRUE(source_of(answer, "a")["lost"]) << answer.json;
  EXPECT_GT(source_of(answer, "b")["bytes"], 0) << answer.json;
  EXPECT_EQ(source_of(answer, "b")["transport"], "verbs") << answer.json;
}

// Row 3.
TEST_F(RdmaSystem, Row3FrozenSourceDoesNotHoldThePullUp) {
  start_source("a", kEachOfTwoSlowly);
  start_source("b", kEachOfTwoSlowly);
  auto pull = start_pull("verbs");
  ASSERT_TRUE(wait_for_bytes(*pull)) << pull->err();
  fleet_.agent("a").process->signal(SIGSTOP);
  const auto answer = finish(*pull);
  fleet_.agent("a").process->signal(SIGCONT);
  ASSERT_NO_FATAL_FAILURE(expect_complete(answer));
}

// Row 3: a NIC needs no process to serve reads.
TEST_F(RdmaSystem, TheOnlySourceFrozenIsReadToTheEnd) {
  start_source("a", kOneSlowly);
  auto pull = start_pull("verbs");
  ASSERT_TRUE(wait_for_bytes(*pull)) << pull->err();
  fleet_.agent("a").process->signal(SIGSTOP);
  const auto answer = finish(*pull);
  fleet_.agent("a").process->signal(SIGCONT);
  ASSERT_NO_FATAL_FAILURE(expect_complete(answer));
  EXPECT_EQ(source_of(answer, "a")["transport"], "verbs") << answer.json;
}

// Row 7.
TEST_F(RdmaSystem, Row7APullerThatIsKilledLeavesNothingBehindAtTheSource) {
  start_source("a", kOneSlowly);
  auto pull = start_pull("verbs");
  ASSERT_TRUE(wait_for_bytes(*pull)) << pull->err();
  ASSERT_EQ(status_of("a")["sessions"], 1);
  pull->kill();
  EXPECT_TRUE(eventually([&] { return status_of("a")["sessions"] == 0; }));
  EXPECT_TRUE(fleet_.agent("a").process->wait_for_err("session.end"));
  auto again = start_pull("verbs");
  const auto answer = finish(*again);
  ASSERT_NO_FATAL_FAILURE(expect_complete(answer));
  EXPECT_GT(answer.json["resumed_bytes"], 0) << "what had verified was fetched again";
  EXPECT_EQ(source_of(answer, "a")["transport"], "verbs") << answer.json;
}

// Rows 4 and 18.
TEST_F(RdmaSystem, Row4RestartedSourceIsAStrangerAndItsKeysAreNotReused) {
  start_source("a", kOneSlowly);
  const std::string address = fleet_.agent("a").control;
  // In the emulated machine the agent may take longer to start than a pull waits by default.
  auto pull = start_pull("verbs", {"--source-timeout", "50s"});
  ASSERT_TRUE(wait_for_bytes(*pull)) << pull->err();
  fleet_.agent("a").process->kill();
  std::vector<std::string> options = kOneSlowly;
  options.insert(options.end(), {"--hca", hca_b_});
  fleet_.start_agent("a", options, address);
  const auto answer = finish(*pull);
  ASSERT_NO_FATAL_FAILURE(expect_complete(answer));
  EXPECT_EQ(source_of(answer, "a")["transport"], "verbs") << answer.json;
}

// Row 6.
TEST_F(RdmaSystem, Row6RetiringAVersionUnderAPullEndsItAndCommitsNothing) {
  start_source("a", kOneSlowly);
  auto pull = start_pull("verbs");
  ASSERT_TRUE(wait_for_bytes(*pull)) << pull->err();
  const auto retired =
      fleet_.run_command({"retire", "m@1", "--store", fleet_.agent("a").store.string()});
  ASSERT_EQ(retired.exit_code, 0) << retired.err;
  const auto answer = finish(*pull);
  EXPECT_EQ(answer.exit_code, 3) << answer.err;
  EXPECT_THAT(answer.err, HasSubstr("NO_SOURCE"));
  EXPECT_FALSE(std::filesystem::exists(fleet_.dir("out") / "model.safetensors"));
  EXPECT_TRUE(fleet_.agent("a").process->running());
}

// One bit in each 100 kB of the memory that the agent serves, as a bad DIMM does it: on tmpfs no
// time stamp of the file tells.
void flip_everywhere(const std::filesystem::path& file) {
  const std::size_t size = std::filesystem::file_size(file);
  const int fd = ::open(file.c_str(), O_RDWR | O_CLOEXEC);
  ASSERT_GE(fd, 0) << file;
  void* const memory = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  ::close(fd);
  ASSERT_NE(memory, MAP_FAILED);
  volatile char* const bytes = static_cast<char*>(memory);
  for (std::size_t at = 1 << 20; at < size; at += 100'003) {
    bytes[at] = static_cast<char>(bytes[at] ^ 1);
  }
  ::munmap(memory, size);
}

// Row 9: a NIC reads whatever is there.
TEST_F(RdmaSystem, Row9BytesThatFlipUnderAPullAreFetchedElsewhere) {
  start_source("a", kEachOfTwoSlowly);
  start_source("b", kEachOfTwoSlowly);
  auto pull = start_pull("verbs");
  ASSERT_TRUE(wait_for_bytes(*pull)) << pull->err();
  flip_everywhere(find_file(fleet_.agent("a").store / "models", "model.safetensors"));
  const auto answer = finish(*pull);
  ASSERT_EQ(answer.exit_code, 0) << answer.err;
  EXPECT_EQ(compare_checkpoints(fleet_.dir("model"), fleet_.dir("out")), "");
  EXPECT_TRUE(answer.json["refetched_bytes"] > 0 || source_of(answer, "a")["lost"]) << answer.json;
}

TEST_F(RdmaSystem, Row10BytesThatFlipUnderAPullFromTheirOnlySourceAreNotHandedOver) {
  start_source("a", kOneSlowly);
  auto pull = start_pull("verbs");
  ASSERT_TRUE(wait_for_bytes(*pull)) << pull->err();
  flip_everywhere(find_file(fleet_.agent("a").store / "models", "model.safetensors"));
  const auto answer = finish(*pull);
  EXPECT_NE(answer.exit_code, 0) << answer.json;
  EXPECT_FALSE(std::filesystem::exists(fleet_.dir("out") / "model.safetensors"));
}

// Row 14: what a puller may take is one share for all rails together.
TEST_F(RdmaSystem, Row14ARateCapHoldsForAllRailsTogether) {
  start_source("a", {"--max-rate", "6MB"});
  auto pull = start_pull("verbs");
  const auto answer = finish(*pull);
  ASSERT_NO_FATAL_FAILURE(expect_complete(answer));
  // Slower for any reason, faster for none but what its bucket held in the beginning.
  EXPECT_LT(answer.json["bytes_per_second"].get<double>(), 6e6 * 1.5) << answer.json;
}

}  // namespace
}  // namespace rekindle::testing
