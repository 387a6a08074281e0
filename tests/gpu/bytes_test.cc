// Every byte of what a worker loads, as it lies on the device.
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <string_view>
#include <vector>

#include <fcntl.h>

#include "src/base/unique_fd.h"
#include "tests/gpu/gpu_workers.h"

namespace rekindle::testing {
namespace {

using BytesOnDevices = GpuWorkers;
using nlohmann::json;

constexpr const char* kSpec = R"({"name": "test", "rules": [
  {"match": "cols", "kind": "split", "dim": 1}, {"match": "rows", "kind": "split", "dim": 0},
  {"match": "**", "kind": "replicate"}]})";

TEST_F(BytesOnDevices, AreThoseOfTheCheckpointWhateverItsTypesAndSizes) {
  const auto checkpoint = odd_checkpoint(1);
  start_agent();
  publish("m@1", checkpoint);
  const auto one = worker();
  for (const char* bucket : {"", " bucket=1048576", " bucket=65536", " bucket=1000"}) {
    SCOPED_TRACE(bucket);
    expect_loads(*one, std::string("attach m@1") + bucket, checkpoint.sums());
    EXPECT_TRUE(is_ok(one->ask("loaded")));
  }
  EXPECT_TRUE(is_ok(one->ask("detach")));
  EXPECT_TRUE(eventually_no_sessions()) << devices();
}

TEST_F(BytesOnDevices, ComeInBucketsNoLargerThanTheAgentsOrTheWorkersSize) {
  const auto checkpoint = odd_checkpoint(2);
  start_agent("a", {"--gpu-bucket", "2MiB"});
  publish("m@1", checkpoint);
  const auto one = worker();
  ASSERT_TRUE(is_ok(one->ask("attach m@1")));
  auto taken = one->ask("take all");
  ASSERT_TRUE(is_ok(taken)) << taken;
  EXPECT_LE(taken["largest"], 2u << 20);
  EXPECT_GT(taken["largest"], 1u << 20);
  ASSERT_TRUE(is_ok(one->ask("attach m@1 bucket=300000")));
  taken = one->ask("take all");
  ASSERT_TRUE(is_ok(taken)) << taken;
  EXPECT_LE(taken["largest"], 300'032u);
  EXPECT_EQ(sums_of(*one), checkpoint.sums());
}

TEST_F(BytesOnDevices, AreRightWhereTheLibraryCopiesThemToTheirTargets) {
  const auto checkpoint = odd_checkpoint(3);
  start_agent();
  publish("m@1", checkpoint);
  const auto one = worker();
  ASSERT_TRUE(is_ok(one->ask("attach m@1 bucket=1048576")));
  const auto done = one->ask("into");
  ASSERT_TRUE(is_ok(done)) << done;
  EXPECT_EQ(done["path"], "ipc");
  EXPECT_EQ(sums_of(*one), checkpoint.sums());
  EXPECT_TRUE(is_ok(one->ask("loaded")));
}

TEST_F(BytesOnDevices, OfAShardAreItsRowsAndColumns) {
  const auto checkpoint = odd_checkpoint(4);
  start_agent();
  publish("m@1", checkpoint);
  auto sums = checkpoint.sums();
  sums.erase("cols");
  sums.erase("rows");
  sums["cols@[0,515]"] = checkpoint.sum_of("cols", 0, 515, 511, 515);
  sums["rows@[257,0]"] = checkpoint.sum_of("rows", 257, 0, 257, 333);
  const auto one = worker("a", {{"WORKER_SPEC", kSpec}});
  expect_loads(*one, "attach m@1 shard=tp=1/2", sums);
  expect_loads(*one, "attach m@1 shard=tp=1/2 bucket=100000", sums);
}

TEST_F(BytesOnDevices, AreRightWhereTheDeviceVerifiesThem) {
  const auto checkpoint = odd_checkpoint(11);
  start_agent("a", {"--verify-gpu"});
  publish("m@1", checkpoint);
  auto sums = checkpoint.sums();
  const auto whole = worker();
  for (const char* bucket : {"", " bucket=1048576", " bucket=65536", " bucket=1000"}) {
    SCOPED_TRACE(bucket);
    expect_loads(*whole, std::string("attach m@1") + bucket, sums);
  }
  sums.erase("cols");
  sums.erase("rows");
  sums["cols@[0,515]"] = checkpoint.sum_of("cols", 0, 515, 511, 515);
  sums["rows@[257,0]"] = checkpoint.sum_of("rows", 257, 0, 257, 333);
  const auto half = worker("a", {{"WORKER_SPEC", kSpec}});
  expect_loads(*half, "attach m@1 shard=tp=1/2 bucket=100000", sums);
  const auto log = [this] { return fleet_.agent("a").process->err(); };
  EXPECT_TRUE(eventually([&] { return log().find("verified=true") != std::string::npos; }))
      << log();
  EXPECT_EQ(log().find("verified=false"), std::string::npos) << log();
}

TEST_F(BytesOnDevices, OfBoxesAreThoseOfTheBoxes) {
  const auto checkpoint = odd_checkpoint(5);
  start_agent();
  publish("m@1", checkpoint);
  const auto one = worker();
  const std::string attach =
      "attach m@1 bucket=65536 box=cols:0,3:511,7 box=cols:100,512:11,518 box=large:1,1:1007,851";
  expect_loads(*one, attach,
               {{"cols@[0,3]", checkpoint.sum_of("cols", 0, 3, 511, 7)},
                {"cols@[100,512]", checkpoint.sum_of("cols", 100, 512, 11, 518)},
                {"large@[1,1]", checkpoint.sum_of("large", 1, 1, 1007, 851)}});
}

TEST_F(BytesOnDevices, AreOfTheVersionThatWasNamedWhenAWorkerGoesToAndFro) {
  const auto first = odd_checkpoint(6);
  const auto second = odd_checkpoint(7);
  start_agent();
  publish("m@1", first);
  publish("m@2", second);
  const auto one = worker();
  for (int round = 0; round < 3; ++round) {
    expect_loads(*one, "attach m@1 bucket=1048576", first.sums());
    expect_loads(*one, "attach m@2 bucket=1048576", second.sums());
  }
  const auto newest = one->ask("attach m");
  EXPECT_EQ(newest.value("version", 0), 2) << newest;
}

TEST_F(BytesOnDevices, ArriveAtTwoWorkersAtOnce) {
  const auto checkpoint = plain_checkpoint(32, 8);
  start_agent();
  publish("m@1", checkpoint);
  const auto one = worker();
  const auto other = worker();
  for (auto* each : {one.get(), other.get()}) {
    ASSERT_TRUE(is_ok(each->ask("attach m@1 bucket=1048576")));
    ASSERT_TRUE(is_ok(each->ask("take 1")));
  }
  EXPECT_EQ(devices().value("sessions", 0), 2) << devices();
  for (auto* each : {one.get(), other.get()}) each->tell("take all");
  for (auto* each : {one.get(), other.get()}) {
    const auto taken = each->answer();
    ASSERT_TRUE(is_ok(taken)) << taken;
    EXPECT_EQ(taken["path"], "ipc");
    EXPECT_EQ(sums_of(*each), checkpoint.sums());
  }
}

TEST_F(BytesOnDevices, ComeWhileThePullThatBringsThemRuns) {
  const bool apart = user_namespaces();  // else the two share memory: too fast to see
  const auto checkpoint = plain_checkpoint(40, 9);
  fleet_.start_coordinator();
  fleet_.start_agent("source", {"--gpu", "none", "--max-rate", "16MB"}, "127.0.0.1:0",
                     apart ? on_host(fleet_.dir("."), 2) : std::vector<std::string>{});
  publish("m@1", checkpoint, "source");
  start_agent("a");
  const auto one = worker();
  const auto attached = one->ask("attach m@1 bucket=1048576");
  ASSERT_TRUE(is_ok(attached)) << attached;
  const auto begun = one->ask("take 1");
  ASSERT_TRUE(is_ok(begun)) << begun;
  if (apart) {
    EXPECT_EQ(begun["rung"], "peers");
    EXPECT_LT(begun["done"], begun["total"]);
  }
  const auto taken = one->ask("take all");
  ASSERT_TRUE(is_ok(taken)) << taken;
  EXPECT_EQ(taken["path"], "ipc");
  EXPECT_EQ(sums_of(*one), checkpoint.sums());
}

std::vector<std::filesystem::path> files_below(const std::filesystem::path& directory,
                                               std::string_view extension) {
  std::vector<std::filesystem::path> files;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(directory)) {
    if (entry.path().extension() == extension) files.push_back(entry.path());
  }
  return files;
}

TEST_F(BytesOnDevices, B1OfAPulledCopyStayClosedForWritingInTheDeviceProcess) {
  const auto checkpoint = plain_checkpoint(40, 12);
  fleet_.start_coordinator();
  fleet_.start_agent("source", {"--gpu", "none"});
  publish("m@1", checkpoint, "source");
  start_agent("a");
  const auto one = worker();
  expect_loads(*one, "attach m@1", checkpoint.sums());
  const auto copies = fleet_.agent("a").store / "models";
  ASSERT_TRUE(eventually([&] { return !files_below(copies, ".manifest").empty(); })) << "commits";
  ASSERT_FALSE(files_below(copies, ".safetensors").empty());
  for (const auto& file : files_below(copies, ".safetensors")) {
    const UniqueFd fd(::open(file.c_str(), O_RDONLY | O_CLOEXEC));
    // The kernel gives a read lease only while nobody has the file open or mapped for writing.
    EXPECT_EQ(::fcntl(fd.get(), F_SETLEASE, F_RDLCK), 0) << file << ": " << std::strerror(errno);
  }
}

TEST_F(BytesOnDevices, AreUploadedByTheWorkerWhenTheAgentHasNoDevices) {
  const auto checkpoint = odd_checkpoint(10);
  start_agent("a", {"--gpu", "none"});
  publish("m@1", checkpoint);
  const auto one = worker();
  expect_loads(*one, "attach m@1", checkpoint.sums(),
               "upload: this agent was started with --gpu none");
  expect_loads(*one, "attach m@1 bucket=65536", checkpoint.sums(), "upload: ");
}

}  // namespace
}  // namespace rekindle::testing
