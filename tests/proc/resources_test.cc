// Rows 47 to 51 as a user meets them: bad files, full disks, no descriptors, ports in use, names
// that nobody knows.
#include <fstream>

#include <unistd.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/fleet.h"

namespace rekindle::testing {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

MATCHER(IsOneLine, "is one line") {
  return !arg.empty() && arg.back() == '\n' && std::ranges::count(arg, '\n') == 1;
}

// Row 47: each seed of the fuzz corpus, as a file.
TEST(BadSafetensors, Row47EachIsTakenOrRefusedInOneLineThatNamesTheFile) {
  const TempDir dir;
  int refused = 0;
  for (const auto& seed : fs::directory_iterator(SAFETENSORS_CORPUS)) {
    SCOPED_TRACE(seed.path().filename());
    const fs::path file = dir / seed.path().filename().string() / "model.safetensors";
    fs::create_directories(file.parent_path());
    fs::copy_file(seed.path(), file);
    const auto inspected = run({REKINDLE_BINARY, "inspect", file.string()});
    const auto published = run(
        {REKINDLE_BINARY, "publish", "m@1", file.parent_path().string(), "--store", dir / "store"});
    ASSERT_THAT(inspected.exit.code, AnyOf(0, 2)) << inspected.err;
    if (inspected.exit.code == 0) {
      EXPECT_EQ(inspected.err, "");
      fs::remove_all(dir / "store");
      continue;
    }
    ++refused;
    EXPECT_THAT(inspected.err, AllOf(IsOneLine(), HasSubstr(file.string())));
    EXPECT_EQ(published.exit.code, 2);
    EXPECT_THAT(published.err, AllOf(HasSubstr(file.string())));
  }
  EXPECT_GE(refused, 20);
}

// Row 49: a file system that really is full. `script` runs in a mount namespace of its own, with a
// new tmpfs of 24 MiB at DIR/small.
class FullDisk : public ::testing::Test {
 protected:
  Finished on_small_disk(const std::string& script) {
    fs::create_directories(fleet_.dir("small"));
    const char* const flags = ::geteuid() == 0 ? "-m" : "-rm";
    return run({"unshare", flags, "sh", "-c",
                "mount -t tmpfs -o size=24m none " + fleet_.dir("small").string() +
                    " || exit 77; rekindle=" REKINDLE_BINARY "; small=" +
                    fleet_.dir("small").string() + "; " + script},
               60'000ms);
  }
  Fleet fleet_;
};

TEST_F(FullDisk, APullThatDoesNotFitNamesTheBytesAndKeepsWhatIsThere) {
  fleet_.start_agent("a");
  make_checkpoint(fleet_.dir("one"), 2, 1024, 5);    // 4 MiB
  make_checkpoint(fleet_.dir("many"), 12, 4096, 6);  // 96 MiB
  fleet_.publish("a", "small@1", fleet_.dir("one"));
  fleet_.publish("a", "large@1", fleet_.dir("many"));
  const std::string from = " --from " + fleet_.agent("a").control;
  const auto done = on_small_disk("$rekindle pull small@1 --to $small/one" + from +
                                  " -q || exit 90; "
                                  "$rekindle pull large@1 --to $small/many --transport tcp" +
                                  from +
                                  " -q; code=$?; "
                                  "$rekindle verify $small/one -q || exit 91; "
                                  "$rekindle pull large@1 --store $small/store --transport tcp" +
                                  from +
                                  " -q; "
                                  "test $? = $code || exit 92; exit $code");
  if (done.exit.code == 77) GTEST_SKIP() << "mount namespaces are not allowed here";
  EXPECT_EQ(done.exit.code, 6) << done.err;
  EXPECT_THAT(done.err, AllOf(HasSubstr("rekindle pull large@1"), HasSubstr("MiB")));
}

TEST_F(FullDisk, APublishThatDoesNotFitNamesTheBytes) {
  make_checkpoint(fleet_.dir("many"), 12, 4096, 6);
  const auto done = on_small_disk("$rekindle publish large@1 " + fleet_.dir("many").string() +
                                  " --store $small/store -q; code=$?; "
                                  "test -z \"$(ls $small/store/staging)\" || exit 93; exit $code");
  if (done.exit.code == 77) GTEST_SKIP() << "mount namespaces are not allowed here";
  EXPECT_EQ(done.exit.code, 6) << done.err;
  EXPECT_THAT(done.err, AllOf(IsOneLine(), HasSubstr("MiB")));
}

// Row 49: errors that only a bad device gives, at a step before and one after the bytes came.
TEST(BadDevice, Row49APullThatMeetsAnErrorSaysSoAndGoesOnLater) {
  Fleet fleet;
  fleet.start_agent("a");
  make_checkpoint(fleet.dir("model"), 2, 1024, 5);
  fleet.publish("a", "m@1", fleet.dir("model"));
  for (const std::string step : {"store.begin.after_segments", "store.commit.start"}) {
    for (const std::string error : {"ENOSPC", "EIO"}) {
      SCOPED_TRACE(step + " " + error);
      const std::string store = fleet.dir("store-" + step + error).string();
      const std::vector<std::string> pull = {"pull",    "m@1", "--from", fleet.agent("a").control,
                                             "--store", store};
      Spawn spawn = fleet.command(pull);
      spawn.env = {{"REKINDLE_FAILPOINTS", step + "=error:" + error}};
      const auto refused = Fleet::answer_of(run(std::move(spawn)));
      EXPECT_NE(refused.exit_code, 0);
      EXPECT_EQ(refused.exit_code == 6, error == "ENOSPC") << refused.err;
      EXPECT_THAT(refused.err, HasSubstr(step));
      const auto again = fleet.run_command(pull);
      ASSERT_EQ(again.exit_code, 0) << again.err;
      if (step == "store.commit.start") {
        EXPECT_EQ(again.json["fetched_bytes"], 0);
      }
      EXPECT_EQ(fleet.run_command({"verify", again.json["path"].get<std::string>()}).exit_code, 0);
    }
  }
}

// Row 50, at the other end.
TEST(FewDescriptors, Row50APullThatRunsOutOfThemSaysSo) {
  Fleet fleet;
  fleet.start_agent("a");
  make_checkpoint(fleet.dir("model"), 2, 1024, 5);
  fleet.publish("a", "m@1", fleet.dir("model"));
  bool refused = false;
  bool done = false;
  for (rlim_t count = 8; count <= 64 && !done; count += 4) {
    Spawn spawn = fleet.command(
        {"pull", "m@1", "--from", fleet.agent("a").control, "--to", fleet.dir("out").string()});
    spawn.limits = {{RLIMIT_NOFILE, {count, count}}};
    const auto answer = run(std::move(spawn));
    EXPECT_FALSE(answer.timed_out) << count;
    EXPECT_EQ(answer.exit.signal, 0) << count << " descriptors: " << answer.err;
    done = answer.exit.code == 0;
    refused = refused || !done;
    if (!done) {
      EXPECT_THAT(answer.err, HasSubstr("rekindle")) << count;
    }
  }
  EXPECT_TRUE(refused);
  EXPECT_TRUE(done);
  EXPECT_EQ(compare_checkpoints(fleet.dir("model"), fleet.dir("out")), "");
}

TEST(Addresses, Row51AnyPortInUseIsNamed) {
  Fleet fleet;
  fleet.start_coordinator();
  fleet.start_agent("a");
  const auto& a = fleet.agent("a");
  const std::string other = fleet.dir("other").string();
  struct Case {
    std::vector<std::string> arguments;
    std::string address;
  };
  for (const Case& taken :
       {Case{{"agent", "--listen", a.control, "--store", other}, a.control},
        Case{{"agent", "--listen", "127.0.0.1:0", "--data-listen", a.data, "--store", other},
             a.data},
        Case{{"coordinator", "--listen", fleet.coordinator_address(), "--state", other},
             fleet.coordinator_address()}}) {
    std::vector<std::string> arguments = taken.arguments;
    arguments.insert(arguments.begin(), REKINDLE_BINARY);
    const auto refused = run(std::move(arguments));
    EXPECT_EQ(refused.exit.code, 5) << refused.err;
    EXPECT_THAT(refused.err, HasSubstr(taken.address));
    EXPECT_THAT(refused.err, AnyOf(HasSubstr("uses this port"), HasSubstr("port is in use")));
  }
}

// Everything over IPv6, ports chosen by the kernel.
TEST(Addresses, Ipv6WorksFromEndToEnd) {
  const TempDir dir(true);
  Process coordinator(
      {.argv = {REKINDLE_BINARY, "coordinator", "--listen", "[::1]:0", "--state", dir / "state"}});
  const std::string cluster = coordinator.value_after("coordinator listening on ");
  if (cluster.empty() && !fs::exists("/proc/net/if_inet6")) GTEST_SKIP() << "no IPv6 here";
  ASSERT_THAT(cluster, HasSubstr("[::1]:"));
  Process agent({.argv = {REKINDLE_BINARY, "agent", "--listen", "[::1]:0", "--store", dir / "a",
                          "--coordinator", cluster}});
  ASSERT_TRUE(agent.wait_for_err("coordinator.connected")) << agent.err();
  EXPECT_THAT(agent.value_after("agent serving data on "), HasSubstr("[::1]:"));
  make_checkpoint(dir / "model", 2, 1024, 5);
  const auto published =
      run({REKINDLE_BINARY, "publish", "m@1", dir / "model", "--store", dir / "a"});
  ASSERT_EQ(published.exit.code, 0) << published.err;
  const auto pulled = run({REKINDLE_BINARY, "pull", "m", "--to", dir / "out", "--transport", "tcp",
                           "--coordinator", cluster});
  ASSERT_EQ(pulled.exit.code, 0) << pulled.err;
  EXPECT_EQ(compare_checkpoints(dir / "model", dir / "out"), "");
}

// An agent of a host that has 10.78.9.1 beside its loopback addresses. The coordinators are not
// there: only the routing table is asked.
class AdvertisedAddress : public ::testing::Test {
 protected:
  void SetUp() override {
    const auto tried = run({"unshare", kFlags, "sh", "-c", kAddresses});
    if (tried.exit.code != 0) GTEST_SKIP() << "no namespaces here: " << tried.err;
  }
  // What the agent tells. Its log is in `log_` afterwards.
  std::string advertised(const std::string& listen, const std::string& coordinators) {
    const std::string command =
        std::string(kAddresses) + " && exec " REKINDLE_BINARY " agent --insecure --listen " +
        listen + " --store " + (dir_ / "a").string() + " --coordinator " + coordinators;
    Process agent({.argv = {"unshare", kFlags, "sh", "-c", command}});
    const std::string address = agent.value_after("agent listening on ");
    log_ = agent.err();
    return address;
  }

  static constexpr const char* kFlags = "-rn";
  static constexpr const char* kAddresses = "ip link set lo up && ip addr add 10.78.9.1/32 dev lo";
  const TempDir dir_{true};
  std::string log_;
};

TEST_F(AdvertisedAddress, IsTheOneThatOtherHostsReachAlsoIfTheFirstCoordinatorIsOnThisHost) {
  EXPECT_THAT(advertised("0.0.0.0:0", "127.0.1.1:1,10.78.9.1:1"), StartsWith("10.78.9.1:"));
  EXPECT_THAT(log_, Not(HasSubstr("agent.loopback")));
}

TEST_F(AdvertisedAddress, IsLoopbackOnlyWithAWarningThatSaysWhatToDo) {
  EXPECT_THAT(advertised("0.0.0.0:0", "127.0.1.1:1"), StartsWith("127.0.0.1:"));
  EXPECT_THAT(log_, AllOf(HasSubstr("agent.loopback"), HasSubstr("give --advertise ADDRESS")));
}

TEST_F(AdvertisedAddress, GivesNoWarningWhereTheUserChoseLoopback) {
  EXPECT_THAT(advertised("127.0.0.1:0", "127.0.1.1:1"), StartsWith("127.0.0.1:"));
  EXPECT_THAT(log_, Not(HasSubstr("agent.loopback")));
}

// Row 51: who asks for a host that nobody knows is told which.
TEST(Addresses, Row51UnknownHostsAreNamed) {
  const TempDir dir;
  const std::string nowhere = "no-such-host.invalid:7300";
  for (const std::vector<std::string>& arguments :
       {std::vector<std::string>{"status", "--coordinator", nowhere},
        {"status", "--agent", nowhere},
        {"pull", "m@1", "--from", nowhere, "--store", dir / "store"},
        {"pull", "m@1", "--coordinator", nowhere, "--store", dir / "store"},
        {"retire", "m@1", "--everywhere", "--coordinator", nowhere},
        {"agent", "--listen", nowhere, "--store", dir / "store"},
        {"coordinator", "--listen", nowhere, "--state", dir / "state"}}) {
    std::vector<std::string> argv = arguments;
    argv.insert(argv.begin(), REKINDLE_BINARY);
    const auto answer = run(std::move(argv));
    EXPECT_FALSE(answer.timed_out) << arguments[0];
    EXPECT_THAT(answer.exit.code, AnyOf(3, 5)) << arguments[0] << ": " << answer.err;
    EXPECT_THAT(answer.err, HasSubstr("no-such-host.invalid")) << arguments[0];
  }
}

}  // namespace
}  // namespace rekindle::testing
