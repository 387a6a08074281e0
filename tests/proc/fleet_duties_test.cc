#include <map>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/proc/cluster.h"

// What a fleet does by itself, and what it does when an operator drains a host: real daemons.
namespace rekindle::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr milliseconds kCopied{60'000};  // too few copies for 10 s, then a pull

class FleetDuties : public ::testing::Test {
 protected:
  void start(std::vector<std::string> more = {}) {
    coordinator_ = start_coordinator(dir_ / "state", std::move(more));
    for (const char* name : {"a", "b", "c"}) {
      agents_[name] = start_agent(name, dir_ / name, coordinator_->address(),
                                  {"--failure-domain", std::string("rack-") + name});
    }
    write_input(3);
  }
  void write_input(std::uint64_t seed) {
    write_safetensors(dir_ / "in/model.safetensors", {{"w", DType::kBF16, {512, 1024}}}, seed);
  }
  Finished publish(const std::string& id, std::vector<std::string> more = {}) {
    std::vector<std::string> arguments{"publish", id, dir_ / "in", "--store", dir_ / "a"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return rekindle(std::move(arguments));
  }
  Json status() {
    return json_of(rekindle({"status", "--json", "--coordinator", coordinator_->address()}));
  }
  Finished drain(const std::string& node, bool undo = false) {
    std::vector<std::string> arguments{"drain", node, "--coordinator", coordinator_->address()};
    if (undo) arguments.emplace_back("--undo");
    return rekindle(std::move(arguments));
  }
  bool holds(const std::string& agent, const std::string& id) const {
    return std::filesystem::exists(dir_ / (agent + "/models/" + id));
  }
  TempDir dir_;
  std::unique_ptr<Daemon> coordinator_;
  std::map<std::string, std::unique_ptr<Daemon>> agents_;
};

TEST_F(FleetDuties, ACopyThatIsLostIsMadeAgainOnAnotherHost) {
  start({"--replicas", "2"});
  ASSERT_EQ(publish("m@1").exit.code, 0);
  const auto copies = [&] { return status()["versions"][0]["whole_copies"] == 2; };
  ASSERT_TRUE(eventually(copies, kCopied)) << status().dump(1);
  const std::string second = holds("b", "m@1") ? "b" : "c";
  const std::string third = second == "b" ? "c" : "b";
  EXPECT_FALSE(holds(third, "m@1")) << "as many as were asked for";
  agents_[second]->process().kill();
  ASSERT_TRUE(eventually([&] { return holds(third, "m@1"); }, kCopied)) << status().dump(1);
  EXPECT_TRUE(eventually(copies, kCopied));
  const std::filesystem::path there = dir_ / (third + "/models/m@1");
  ASSERT_FALSE(std::filesystem::is_empty(there));
  for (const auto& copy : std::filesystem::directory_iterator(there)) {
    EXPECT_EQ(rekindle({"verify", copy.path()}).exit.code, 0);
  }
}

TEST_F(FleetDuties, AVersionMayAskForCopiesByItself) {
  start();
  ASSERT_EQ(publish("m@1").exit.code, 0);
  write_input(4);
  ASSERT_EQ(publish("m@2", {"--replicas", "3"}).exit.code, 0);
  ASSERT_TRUE(eventually([&] { return holds("b", "m@2") && holds("c", "m@2"); }, kCopied));
  EXPECT_FALSE(holds("b", "m@1") || holds("c", "m@1"));
}

TEST_F(FleetDuties, ADrainedHostIsLeftAloneUntilItIsUndone) {
  start();
  ASSERT_EQ(publish("m@1").exit.code, 0);
  const Finished drained = drain("a");
  EXPECT_EQ(drained.exit.code, 0) << drained.err;
  EXPECT_THAT(drained.out, AllOf(HasSubstr("0 pulls still read there"),
                                 HasSubstr("m@1 has no whole copy elsewhere")));
  const Finished refused = rekindle({"pull", "m@1", "--store", dir_ / "b"});
  EXPECT_NE(refused.exit.code, 0);
  EXPECT_THAT(refused.err, HasSubstr("only drained nodes hold it: a"));
  EXPECT_EQ(status()["nodes"][0]["drained"], true);
  EXPECT_EQ(drain("a", /*undo=*/true).exit.code, 0);
  EXPECT_EQ(rekindle({"pull", "m@1", "--store", dir_ / "b"}).exit.code, 0);
  const Finished unknown = drain("nobody");
  EXPECT_EQ(unknown.exit.code, 3) << unknown.err;
}

}  // namespace
}  // namespace rekindle::testing
