// Bytes of committed copies go wrong at rest. The agent finds them, keeps its readers away, and
// puts them right with the help of peers; without any it says which tensor is lost.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <gmock/gmock.h>

#include "tests/proc/worker_fixture.h"
#include "tests/support/rot.h"

namespace rekindle::testing {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr std::uint64_t kMiB = 1 << 20;

ino_t inode_of(const fs::path& file) {
  struct stat status {};
  EXPECT_EQ(::stat(file.c_str(), &status), 0) << file;
  return status.st_ino;
}

class MendedCopies : public WithWorkers {
 protected:
  void SetUp() override {
    make_checkpoint(fleet_.dir("model"), 8, 1024, 7);
    fleet_.start_coordinator();
    fleet_.start_agent("a");
    fleet_.publish("a", "m@1", fleet_.dir("model"));
  }
  void copy_to(const std::string& agent) {
    const auto copied =
        fleet_.run_command({"pull", "m@1", "--store", fleet_.agent(agent).store.string()});
    ASSERT_EQ(copied.exit_code, 0) << copied.err;
  }
  fs::path segment_of(const std::string& agent) {
    return find_file(fleet_.agent(agent).store / "models", "model.safetensors");
  }
  // Of m@1 as the agent's status has it.
  nlohmann::json copy_at(const std::string& agent) {
    const auto now = status(agent);
    if (!now.is_object() || !now.contains("copies")) return {};
    for (const auto& copy : now["copies"]) {
      if (copy["model"] == "m" && copy["version"] == 1) return copy;
    }
    return {};
  }
  bool eventually_copy(const std::string& agent, const std::string& state,
                       const std::string& found) {
    return eventually([&] {
      const auto copy = copy_at(agent);
      return copy.is_object() && copy["state"] == state &&
             copy["found"].get<std::string>().find(found) != std::string::npos;
    });
  }
  std::vector<std::string> kinds_of_copy_events(const std::string& agent) {
    std::vector<std::string> kinds;
    for (const auto& event : events_of(agent)) {
      const std::string kind = event["event"];
      if (kind.starts_with("copy_")) kinds.push_back(kind);
    }
    return kinds;
  }
  // Oracle: the published files.
  void expect_as_published(const std::string& agent) {
    const fs::path copy = segment_of(agent).parent_path();
    EXPECT_EQ(compare_checkpoints(fleet_.dir("model"), copy), "");
    const auto verified = run({rekindle_program(), "verify", copy.string()});
    EXPECT_EQ(verified.exit.code, 0) << verified.err;
  }
};

TEST_F(MendedCopies, AWrongTileIsFetchedFromAPeerIntoTheSameFile) {
  fleet_.start_agent("b");
  copy_to("b");
  const ino_t before = inode_of(segment_of("b"));
  flip_by_write(segment_of("b"), 5 * kMiB);
  ASSERT_TRUE(eventually_copy("b", "verified", "mended from peers")) << copy_at("b").dump();
  EXPECT_THAT(copy_at("b")["found"].get<std::string>(), HasSubstr("1 tile of model.layers."));
  EXPECT_GT(copy_at("b")["read_unix_us"], 0);
  EXPECT_EQ(inode_of(segment_of("b")), before);
  expect_as_published("b");
  EXPECT_THAT(kinds_of_copy_events("b"), ::testing::ElementsAre("copy_rotten", "copy_mended"));
  // It is a source again, alone.
  fleet_.agent("a").process->kill();
  const auto pulled = fleet_.run_command({"pull", "m@1", "--to", fleet_.dir("out").string()});
  ASSERT_EQ(pulled.exit_code, 0) << pulled.err;
  EXPECT_EQ(compare_checkpoints(fleet_.dir("model"), fleet_.dir("out")), "");
}

TEST_F(MendedCopies, ThePublishersOwnFilesAreMendedToo) {
  fleet_.start_agent("b");
  copy_to("b");
  flip_by_write(segment_of("a"), 3 * kMiB);
  ASSERT_TRUE(eventually_copy("a", "verified", "mended from peers")) << copy_at("a").dump();
  EXPECT_EQ(read_file(segment_of("a")), read_file(fleet_.dir("model") / "model.safetensors"));
}

TEST_F(MendedCopies, AFileThatSomebodyMayStillWriteToIsLeftForAFreshOne) {
  fleet_.start_agent("b");
  copy_to("b");
  const ino_t before = inode_of(segment_of("b"));
  const int writer = ::open(segment_of("b").c_str(), O_RDWR | O_CLOEXEC);
  ASSERT_GE(writer, 0);
  ASSERT_EQ(::pwrite(writer, "wrong", 5, 5 * kMiB), 5);
  ASSERT_TRUE(eventually_copy("b", "verified", "mended from peers")) << copy_at("b").dump();
  EXPECT_NE(inode_of(segment_of("b")), before);
  EXPECT_EQ(::pwrite(writer, "wrong", 5, 6 * kMiB), 5);
  ::close(writer);
  expect_as_published("b");
}

TEST_F(MendedCopies, TheScrubberFindsWhatNoStampTells) {
  fleet_.start_agent("b");
  copy_to("b");
  fleet_.agent("b").process->kill();
  auto writer = std::make_unique<SilentFlips>(segment_of("b"));
  fleet_.start_agent("b", {"--scrub", "100ms"}, "127.0.0.1:0", Fleet::without_leases());
  ASSERT_TRUE(eventually_copy("b", "verified", "")) << copy_at("b").dump();
  writer->flip(5 * kMiB);
  writer.reset();
  ASSERT_TRUE(eventually_copy("b", "verified", "mended from peers")) << copy_at("b").dump();
  expect_as_published("b");
}

TEST_F(MendedCopies, RepairOnDemandFindsWhatNoStampTells) {
  fleet_.start_agent("b");
  copy_to("b");
  fleet_.agent("b").process->kill();
  auto writer = std::make_unique<SilentFlips>(segment_of("b"));
  fleet_.start_agent("b", {"--scrub", "off"}, "127.0.0.1:0", Fleet::without_leases());
  ASSERT_TRUE(eventually_copy("b", "verified", "")) << copy_at("b").dump();
  writer->flip(5 * kMiB);
  writer.reset();
  const std::string store = fleet_.agent("b").store.string();
  const auto repaired = run({rekindle_program(), "verify", "--repair", "m@1", "--store", store});
  EXPECT_EQ(repaired.exit.code, 0) << repaired.err;
  EXPECT_THAT(repaired.out, HasSubstr("mended from peers"));
  expect_as_published("b");
  const auto again = run({rekindle_program(), "verify", "--repair", "m@1", "--store", store});
  EXPECT_EQ(again.exit.code, 0) << again.err;
  const auto unknown = run({rekindle_program(), "verify", "--repair", "m@9", "--store", store});
  EXPECT_EQ(unknown.exit.code, 3) << unknown.err;
  EXPECT_THAT(unknown.err, HasSubstr("does not hold m@9"));
}

TEST_F(MendedCopies, WithoutAPeerTheTensorIsNamedAndTheRestIsKeptForThePublisher) {
  flip_by_write(segment_of("a"), 5 * kMiB);
  ASSERT_TRUE(eventually_copy("a", "quarantined", "not mended")) << copy_at("a").dump();
  EXPECT_THAT(copy_at("a")["found"].get<std::string>(), HasSubstr("1 tile of model.layers."));
  const std::string store = fleet_.agent("a").store.string();
  const auto repair = run({rekindle_program(), "verify", "--repair", "m@1", "--store", store});
  EXPECT_EQ(repair.exit.code, 4) << repair.out << repair.err;
  const auto pulled = fleet_.run_command({"pull", "m@1", "--to", fleet_.dir("out").string()});
  EXPECT_NE(pulled.exit_code, 0);
  // The same bytes again make it whole.
  fleet_.publish("a", "m@1", fleet_.dir("model"));
  ASSERT_TRUE(eventually_copy("a", "verified", "")) << copy_at("a").dump();
  const auto fine = fleet_.run_command({"pull", "m@1", "--to", fleet_.dir("fine").string()});
  ASSERT_EQ(fine.exit_code, 0) << fine.err;
  EXPECT_EQ(compare_checkpoints(fleet_.dir("model"), fleet_.dir("fine")), "");
}

TEST_F(MendedCopies, WhatIsSetAsideIsMendedWhenAPeerComes) {
  fleet_.start_agent("b");
  copy_to("b");
  fleet_.agent("a").process->kill();
  flip_by_write(segment_of("b"), 5 * kMiB);
  ASSERT_TRUE(eventually_copy("b", "quarantined", "not mended")) << copy_at("b").dump();
  fleet_.start_agent("a");
  const std::string store = fleet_.agent("b").store.string();
  ASSERT_TRUE(eventually([&] {
    return run({rekindle_program(), "verify", "--repair", "m@1", "--store", store}).exit.code == 0;
  })) << copy_at("b").dump();
  expect_as_published("b");
}

TEST_F(MendedCopies, AHeaderThatIsNotTheOneOfTheLayoutEndsTheCopy) {
  fleet_.start_agent("b");
  copy_to("b");
  flip_by_write(segment_of("b"), 12);  // in the name of the first tensor
  ASSERT_TRUE(eventually([&] {
    const auto kinds = kinds_of_copy_events("b");
    return std::ranges::find(kinds, "copy_lost") != kinds.end();
  }));
  EXPECT_THAT(fleet_.agent("b").process->err(), HasSubstr("safetensors: "));
  const auto one = worker("b");
  EXPECT_EQ(sum_of(*one).size(), 32u) << one->out() << one->err();
}

}  // namespace
}  // namespace rekindle::testing
