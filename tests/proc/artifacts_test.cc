// Compile caches on real hosts: `rekindle artifacts`, and `rekindle run --artifacts`.
#include <csignal>
#include <map>

#include <gmock/gmock.h>

#include "tests/proc/worker_fixture.h"

namespace rekindle::testing {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

class Artifacts : public WithWorkers {
 protected:
  // `under`: for the agent "a", on_host().
  void start(std::vector<std::string> of_source = {}, std::vector<std::string> under = {}) {
    fleet_.start_coordinator();
    fleet_.start_agent("a", std::move(of_source), "127.0.0.1:0", std::move(under));
    fleet_.start_agent("b");
    add("one", "1");
    add("deep/two", std::string(3'000'000, '2'));
    add("empty", "");
  }
  void add(const std::string& name, const std::string& bytes, const std::string& cache = "cache") {
    const fs::path file = fleet_.dir(cache) / name;
    fs::create_directories(file.parent_path());
    write_file(file, bytes);
  }
  std::vector<std::string> words(const std::string& action, const std::string& agent,
                                 const std::string& cache, const std::string& fingerprint) {
    return {"artifacts", action,          "m",      "--fingerprint", fingerprint, "t=" + dir(cache),
            "--store",   store_of(agent), "--quiet"};
  }
  Fleet::Answer publish(const std::string& agent, const std::string& cache,
                        const std::string& fingerprint = "F") {
    return fleet_.run_command(words("publish", agent, cache, fingerprint));
  }
  Fleet::Answer fetch(const std::string& agent, const std::string& cache,
                      const std::string& fingerprint = "F") {
    return fleet_.run_command(words("fetch", agent, cache, fingerprint));
  }
  std::size_t sets_listed() {
    const auto listed = fleet_.run_command({"artifacts", "list"});
    EXPECT_EQ(listed.exit_code, 0) << listed.err;
    return listed.json["artifacts"].size();
  }
  // `rekindle run` with the cache, and a shell as the worker.
  Spawn supervised(const std::string& agent, const std::string& cache, const std::string& script,
                   std::vector<std::string> more = {}) {
    Spawn spawn;
    spawn.argv = {rekindle_program(),
                  "run",
                  "--model",
                  "m",
                  "--store",
                  store_of(agent),
                  "--coordinator",
                  fleet_.coordinator_address(),
                  "--artifacts",
                  "t=" + dir(cache),
                  "--artifacts-fingerprint",
                  "F"};
    spawn.argv.insert(spawn.argv.end(), more.begin(), more.end());
    spawn.argv.insert(spawn.argv.end(), {"--", "/bin/sh", "-c", script});
    return spawn;
  }
  std::string dir(const std::string& name) const { return fleet_.dir(name).string(); }
  std::string store_of(const std::string& agent) { return fleet_.agent(agent).store.string(); }

  static std::map<std::string, std::string> tree(const fs::path& root) {
    std::map<std::string, std::string> files;
    if (!fs::exists(root)) return files;
    for (const auto& entry : fs::recursive_directory_iterator(root)) {
      const std::string name = fs::relative(entry.path(), root).string();
      files[name] = entry.is_regular_file() ? read_file(entry.path()) : "a directory";
    }
    return files;
  }
};

TEST_F(Artifacts, AFetchOnAnotherHostGivesTheSameTree) {
  start();
  const auto published = publish("a", "cache");
  ASSERT_EQ(published.exit_code, 0) << published.err;
  EXPECT_EQ(published.json["published"], true);
  EXPECT_EQ(published.json["files"], 3);
  const auto fetched = fetch("b", "new");
  ASSERT_EQ(fetched.exit_code, 0) << fetched.err;
  EXPECT_EQ(fetched.json["written"], 3);
  EXPECT_EQ(fetched.json["root"], published.json["root"]);
  EXPECT_EQ(tree(fleet_.dir("new")), tree(fleet_.dir("cache")));
  // The host that fetched is a source now.
  fleet_.agent("a").process->kill();
  const auto again = fetch("b", "again");
  ASSERT_EQ(again.exit_code, 0) << again.err;
  EXPECT_EQ(tree(fleet_.dir("again")), tree(fleet_.dir("cache")));
}

TEST_F(Artifacts, AnotherFingerprintOrModelGetsNothing) {
  start();
  ASSERT_EQ(publish("a", "cache").exit_code, 0);
  const auto other = fetch("b", "new", "F2");
  EXPECT_EQ(other.exit_code, 3);
  EXPECT_THAT(other.err, HasSubstr("with this fingerprint"));
  auto words_of_n = words("fetch", "b", "new", "F");
  words_of_n[2] = "n";
  EXPECT_EQ(fleet_.run_command(words_of_n).exit_code, 3);
  EXPECT_FALSE(fs::exists(fleet_.dir("new")));
}

TEST_F(Artifacts, ASetIsPublishedOnceUnlessItIsReplacedAndRemoved) {
  start();
  ASSERT_EQ(publish("a", "cache").json["published"], true);
  add("more", "3");
  const auto second = publish("b", "cache");
  EXPECT_EQ(second.exit_code, 0) << second.err;
  EXPECT_EQ(second.json["published"], false);
  auto replace = words("publish", "b", "cache", "F");
  replace.push_back("--replace");
  EXPECT_EQ(fleet_.run_command(replace).json["version"], 2);
  EXPECT_TRUE(eventually([&] { return sets_listed() == 1; }));
  EXPECT_EQ(fetch("a", "new").json["files"], 4);
  ASSERT_EQ(publish("a", "cache", "old").json["published"], true);
  const auto removed = fleet_.run_command(
      {"artifacts", "remove", "m", "--fingerprint", "F", "--others", "--store", store_of("a")});
  EXPECT_EQ(removed.json["removed"].size(), 1u) << removed.err;
  EXPECT_EQ(fetch("b", "none", "old").exit_code, 3);
  EXPECT_EQ(fleet_.run_command({"artifacts", "remove", "m", "--fingerprint", "F"}).exit_code, 0);
  EXPECT_EQ(sets_listed(), 0u);
  // A removed version never comes back, so the next one has another number.
  EXPECT_EQ(publish("a", "cache").json["version"], 3);
  EXPECT_EQ(fleet_.run_command({"artifacts", "remove", "m", "--fingerprint", "G"}).exit_code, 3);
}

TEST_F(Artifacts, ASetWhoseHostsAreGoneIsPublishedAnew) {
  start();
  ASSERT_EQ(publish("b", "cache").json["version"], 1);
  fleet_.agent("b").process->kill();
  ASSERT_TRUE(eventually([&] { return publish("a", "cache").json["published"] == true; },
                         milliseconds(60'000)));
  EXPECT_EQ(fetch("a", "new").json["version"], 2);
  EXPECT_EQ(tree(fleet_.dir("new")), tree(fleet_.dir("cache")));
  // The lost one does not come back with its host.
  fleet_.start_agent("b");
  EXPECT_TRUE(eventually([&] { return sets_listed() == 1; }));
}

TEST_F(Artifacts, OfTwoHostsThatPublishAtOnceOneWinsAndTheOtherSaysSo) {
  start();
  add("one", "other", "cache-b");
  for (const std::string fingerprint : {"1", "2", "3", "4"}) {
    Process first(fleet_.command(words("publish", "a", "cache", fingerprint)));
    Process second(fleet_.command(words("publish", "b", "cache-b", fingerprint)));
    ASSERT_EQ(first.wait(), (Exit{0, 0})) << first.err();
    ASSERT_EQ(second.wait(), (Exit{0, 0})) << second.err();
    const auto one = nlohmann::json::parse(first.out());
    const auto two = nlohmann::json::parse(second.out());
    ASSERT_NE(one["published"], two["published"]) << first.out() << second.out();
    const bool first_won = one["published"];
    EXPECT_THAT((first_won ? two : one)["why"],
                ::testing::AnyOf("another host was first", "the fleet has it already"));
    EXPECT_EQ(one["version"], two["version"]);
    ASSERT_EQ(fetch("b", "new" + fingerprint, fingerprint).exit_code, 0);
    EXPECT_EQ(tree(fleet_.dir("new" + fingerprint)),
              tree(fleet_.dir(first_won ? "cache" : "cache-b")));
  }
}

TEST_F(Artifacts, FetchesIntoOneDirectoryAtTheSameTimeAllSucceed) {
  start();
  for (int i = 0; i < 200; ++i) add("many/" + std::to_string(i), std::string(1000, 'x'));
  ASSERT_EQ(publish("a", "cache").exit_code, 0);
  std::vector<std::unique_ptr<Process>> fetches;
  for (int i = 0; i < 5; ++i) {
    fetches.push_back(std::make_unique<Process>(fleet_.command(words("fetch", "b", "new", "F"))));
  }
  std::uint64_t written = 0;
  for (auto& one : fetches) {
    ASSERT_EQ(one->wait(milliseconds(60'000)), (Exit{0, 0})) << one->err();
    const auto report = nlohmann::json::parse(one->out());
    EXPECT_EQ(report["kept"], 0);
    written += report["written"].get<std::uint64_t>();
  }
  EXPECT_EQ(written, 203u);
  EXPECT_EQ(tree(fleet_.dir("new")), tree(fleet_.dir("cache")));
}

TEST_F(Artifacts, WithoutACoordinatorTheOwnCopyServesAndNothingElseDoes) {
  start();
  ASSERT_EQ(publish("a", "cache").exit_code, 0);
  fleet_.coordinator().kill();
  const auto own = fetch("a", "own");
  EXPECT_EQ(own.exit_code, 0) << own.err;
  EXPECT_EQ(tree(fleet_.dir("own")), tree(fleet_.dir("cache")));
  const auto other = fetch("b", "new");
  EXPECT_EQ(other.exit_code, 5) << other.err;
  EXPECT_FALSE(fs::exists(fleet_.dir("new")));
  EXPECT_EQ(publish("a", "cache", "G").exit_code, 5);
}

TEST_F(Artifacts, ASourceThatDiesLeavesTheCacheUntouchedAndTheNextFetchEnds) {
  if (!user_namespaces()) GTEST_SKIP() << "no user namespaces here";
  start({"--max-rate", "4MB"}, on_host(fleet_.dir("."), 2));
  add("large", std::string(30'000'000, 'l'));
  ASSERT_EQ(publish("a", "cache").exit_code, 0);
  Process first(fleet_.command(words("fetch", "b", "new", "F")));
  const fs::path models = fleet_.agent("b").store / "models";
  ASSERT_TRUE(eventually([&] {
    const auto names = tree(models);
    return std::ranges::any_of(names,
                               [](const auto& file) { return file.first.ends_with(".partial"); });
  }));
  fleet_.agent("a").process->kill();
  const auto ended = first.wait(milliseconds(60'000));
  ASSERT_TRUE(ended);
  EXPECT_NE(ended->code, 0);
  EXPECT_TRUE(tree(fleet_.dir("new")).empty());
  fleet_.start_agent("a");
  ASSERT_TRUE(eventually([&] { return fetch("b", "new").exit_code == 0; }, milliseconds(60'000)));
  EXPECT_EQ(tree(fleet_.dir("new")), tree(fleet_.dir("cache")));
}

TEST_F(Artifacts, ABadCommandLineIsOneLine) {
  start();
  for (auto bad : std::vector<std::vector<std::string>>{
           {"publish", "m", "t=" + dir("cache"), "--fingerprint", ""},
           {"publish", "m@1", "t=" + dir("cache"), "--fingerprint", "F"},
           {"fetch", "m", "cache", "--fingerprint", "F"},
           {"fetch", "m", "t=x", "t=y", "--fingerprint", "F"},
           {"remove", "m"},
           {"fetch", "m", "t=x"}}) {
    bad.insert(bad.begin(), "artifacts");
    bad.insert(bad.end(), {"--store", store_of("a")});
    const auto done = fleet_.run_command(bad);
    EXPECT_EQ(done.exit_code, 2) << bad[1] << ' ' << done.err;
    EXPECT_EQ(std::ranges::count(done.err, '\n'), 1) << done.err;
  }
  EXPECT_EQ(publish("a", "no-such-cache").exit_code, 3);
  // The store is left alone, so that an agent can start there.
  for (const std::string action : {"publish", "fetch"}) {
    auto alone = words(action, "a", "cache", "F");
    *std::ranges::find(alone, store_of("a")) = dir("no-store");
    const auto done = fleet_.run_command(alone);
    EXPECT_EQ(done.exit_code, 5) << done.err;
    EXPECT_THAT(done.err, HasSubstr("none answers at " + dir("no-store")));
    EXPECT_FALSE(fs::exists(fleet_.dir("no-store")));
  }
}

TEST_F(Artifacts, RunFetchesBeforeTheWorkerStarts) {
  start();
  ASSERT_EQ(publish("a", "cache").exit_code, 0);
  const auto done = run(supervised("b", "new", "cat " + dir("new") + "/one"));
  EXPECT_EQ(done.exit.code, 0) << done.err;
  EXPECT_EQ(done.out, "1");
}

TEST_F(Artifacts, RunStartsColdWhereThereIsNoSet) {
  start();
  const auto done = run(supervised("b", "new", "echo up"));
  EXPECT_EQ(done.exit.code, 0) << done.err;
  EXPECT_EQ(done.out, "up\n");
  EXPECT_THAT(done.err, HasSubstr("with this fingerprint"));
  EXPECT_THAT(done.err, HasSubstr("starting without"));
}

TEST_F(Artifacts, RunDoesNotWaitForASourceThatHangs) {
  start();
  ASSERT_EQ(publish("a", "cache").exit_code, 0);
  fleet_.agent("b").process->signal(SIGSTOP);
  const auto done = run(supervised("b", "new", "echo up", {"--artifacts-timeout", "200ms"}));
  fleet_.agent("b").process->signal(SIGCONT);
  EXPECT_EQ(done.exit.code, 0) << done.err;
  EXPECT_EQ(done.out, "up\n");
  EXPECT_THAT(done.err, HasSubstr("took too long"));
}

TEST_F(Artifacts, RunCanBeStoppedWhileItFetches) {
  start();
  fleet_.agent("b").process->signal(SIGSTOP);
  Process supervisor(supervised("b", "new", "echo up"));
  const std::string children = "/proc/" + std::to_string(supervisor.pid()) + "/task/" +
                               std::to_string(supervisor.pid()) + "/children";
  ASSERT_TRUE(eventually([&] { return !read_file(children).empty(); }));
  supervisor.signal(SIGTERM);
  const auto ended = supervisor.wait();
  fleet_.agent("b").process->signal(SIGCONT);
  ASSERT_TRUE(ended);
  EXPECT_EQ(ended->code, 128 + SIGTERM);
  EXPECT_EQ(supervisor.out(), "");
}

TEST_F(Artifacts, RunPublishesTheQuietCachesOfAReadyInstanceOnce) {
  make_checkpoint(fleet_.dir("model"), 2, 64, 9);
  start();
  fleet_.publish("a", "m@1", fleet_.dir("model"));
  const auto publish_when = [&](const std::string& quiet_for, const std::string& fingerprint) {
    auto when = words("publish", "a", "cache", fingerprint);
    when.insert(when.end(), {"--when-ready", "i", "--quiet-for", quiet_for, "--timeout", "300ms"});
    return fleet_.run_command(when);
  };
  const auto early = publish_when("0ms", "F");
  EXPECT_EQ(early.exit_code, 5) << early.err;
  EXPECT_THAT(early.err, HasSubstr("i is not ready"));
  EXPECT_EQ(sets_listed(), 0u);
  Process supervisor(supervised("a", "cache", "exec " + worker_program(),
                                {"--instance", "i", "--artifacts-quiet", "100ms"}));
  ASSERT_EQ(sum_of(supervisor).size(), 32u) << supervisor.err();
  const auto restless = publish_when("1h", "G");
  EXPECT_EQ(restless.exit_code, 5) << restless.err;
  EXPECT_THAT(restless.err, HasSubstr("have not been quiet"));
  ASSERT_TRUE(eventually([&] { return sets_listed() == 1; })) << supervisor.err();
  ASSERT_EQ(fetch("b", "new").exit_code, 0);
  EXPECT_EQ(tree(fleet_.dir("new")), tree(fleet_.dir("cache")));
}

TEST_F(Artifacts, TheWaitForAPublicationEndsWithTheWorker) {
  start();
  const auto done = run(supervised("a", "cache", "exit 0", {"--instance", "i"}));
  EXPECT_EQ(done.exit.code, 0) << done.err;
  EXPECT_FALSE(done.timed_out);
  EXPECT_EQ(sets_listed(), 0u);
}

TEST_F(Artifacts, TheDefaultCachesAreThoseOfTheEnginesAndBelongToTheFingerprint) {
  start();
  Spawn spawn = supervised("b", "new", "echo $TRITON_CACHE_DIR $TORCHINDUCTOR_CACHE_DIR",
                           {"--artifacts", "default"});
  spawn.env = {{"XDG_CACHE_HOME", dir("xdg")}, {"TORCHINDUCTOR_CACHE_DIR", dir("mine")}};
  const auto done = run(std::move(spawn));
  EXPECT_EQ(done.exit.code, 0) << done.err;
  EXPECT_THAT(done.out,
              ::testing::MatchesRegex(dir("xdg") + "/rekindle/artifacts/[0-9a-f]+/triton " +
                                      dir("mine") + "\n"));
  const auto refused =
      run({rekindle_program(), "run", "--model", "m", "--artifacts", "default", "--", "/bin/true"});
  EXPECT_EQ(refused.exit.code, 2);
  EXPECT_THAT(refused.err, HasSubstr("--artifacts-fingerprint"));
}

}  // namespace
}  // namespace rekindle::testing
