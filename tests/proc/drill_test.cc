// `rekindle drill` on a live fleet: what it kills, what it reports, and what it refuses.
#include <array>
#include <atomic>
#include <csignal>
#include <mutex>
#include <thread>

#include <arpa/inet.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <gmock/gmock.h>

#include "src/base/unique_fd.h"
#include "tests/proc/worker_fixture.h"

namespace rekindle::testing {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::ContainsRegex;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

// Stands in for an engine: answers 503 to so many requests, and then 200. Keeps what it was asked.
class Engine {
 public:
  explicit Engine(int refusals) : refusals_(refusals) {
    const sockaddr_in any{
        .sin_family = AF_INET, .sin_port = 0, .sin_addr = {htonl(INADDR_LOOPBACK)}, .sin_zero = {}};
    sockaddr_in bound{};
    socklen_t size = sizeof bound;
    EXPECT_EQ(::bind(listener_.get(), reinterpret_cast<const sockaddr*>(&any), sizeof any), 0);
    EXPECT_EQ(::listen(listener_.get(), 8), 0);
    ::getsockname(listener_.get(), reinterpret_cast<sockaddr*>(&bound), &size);
    url_ = "http://127.0.0.1:" + std::to_string(ntohs(bound.sin_port)) + "/v1/completions";
    thread_ = std::thread([this] { serve(); });
  }
  ~Engine() {
    over_ = true;
    thread_.join();
  }
  const std::string& url() const { return url_; }
  std::vector<std::string> requests() {
    const std::lock_guard lock(mutex_);
    return requests_;
  }

 private:
  // Header and body may come in separate parts.
  static bool is_whole(const std::string& request) {
    const std::size_t end_of_header = request.find("\r\n\r\n");
    if (end_of_header == std::string::npos) return false;
    static constexpr std::string_view kLength = "Content-Length: ";
    const std::size_t length = request.find(kLength);
    const std::size_t body =
        length < end_of_header ? std::stoul(request.substr(length + kLength.size())) : 0;
    return request.size() >= end_of_header + 4 + body;
  }
  void serve() {
    while (!over_) {
      pollfd entry{listener_.get(), POLLIN, 0};
      if (::poll(&entry, 1, 50) != 1) continue;
      const UniqueFd client(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
      std::string request;
      std::array<char, 4096> part;
      while (!is_whole(request)) {
        const ssize_t got = ::read(client.get(), part.data(), part.size());
        if (got <= 0) break;
        request.append(part.data(), static_cast<std::size_t>(got));
      }
      if (!is_whole(request)) continue;
      std::size_t count = 0;
      {
        const std::lock_guard lock(mutex_);
        requests_.push_back(std::move(request));
        count = requests_.size();
      }
      const std::string answer = std::string("HTTP/1.1 ") +
                                 (count > static_cast<std::size_t>(refusals_) ? "200" : "503") +
                                 " x\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";
      (void)!::write(client.get(), answer.data(), answer.size());
    }
  }

  const int refusals_;
  const UniqueFd listener_{::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)};
  std::string url_;
  std::atomic<bool> over_ = false;
  std::mutex mutex_;
  std::vector<std::string> requests_;
  std::thread thread_;
};

class Drills : public WithWorkers {
 protected:
  // Two agents that hold the same version and serve it slowly.
  void start_two(std::vector<std::string> of_coordinator = {}) {
    make_checkpoint(fleet_.dir("model"), 8, 2048, 9);
    fleet_.start_coordinator("127.0.0.1", std::move(of_coordinator));
    for (const char* name : {"a", "b"}) {
      fleet_.start_agent(name, {"--allow-drills", "--max-rate", "6MB"});
      fleet_.publish(name, "m@1", fleet_.dir("model"));
    }
  }
  Spawn kill_source(std::vector<std::string> more = {}) const {
    std::vector<std::string> arguments = {
        "kill-source", "m@1", "--yes", "--transport", "tcp", "--to", fleet_.dir("").string()};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return drill(std::move(arguments));
  }
  bool left_something_behind() const {
    return std::ranges::any_of(
        std::filesystem::directory_iterator(fleet_.dir("")), [](const auto& entry) {
          return entry.path().string().find("rekindle-drill") != std::string::npos;
        });
  }
  void start(std::vector<std::string> more = {"--allow-drills"}) {
    make_checkpoint(fleet_.dir("model"), 2, 64, 9);
    fleet_.start_coordinator("127.0.0.1", more);
    fleet_.start_agent("a", more);
    fleet_.publish("a", "m@1", fleet_.dir("model"));
  }
  Spawn drill(std::vector<std::string> arguments) const {
    Spawn spawn;
    spawn.argv = {rekindle_program(), "drill"};
    spawn.argv.insert(spawn.argv.end(), arguments.begin(), arguments.end());
    spawn.argv.insert(spawn.argv.end(), {"--coordinator", fleet_.coordinator_address()});
    return spawn;
  }
  // A worker of the instance i that is started again when it dies.
  std::unique_ptr<Process> supervised_worker(const std::string& standbys) {
    Spawn spawn;
    spawn.argv = {rekindle_program(), "run",    "--model", "m",
                  "--instance",       "i",      "--store", fleet_.agent("a").store.string(),
                  "--standby",        standbys, "--",      worker_program()};
    auto running = std::make_unique<Process>(std::move(spawn));
    EXPECT_EQ(sum_of(*running).size(), 32u) << running->err();
    return running;
  }
  static std::vector<std::string> phases_of(const nlohmann::json& report) {
    std::vector<std::string> names;
    for (const auto& phase : report["timeline"]) names.push_back(phase["phase"]);
    return names;
  }
  Process& agent() { return *fleet_.agent("a").process; }
};

TEST_F(Drills, AWorkerThatIsKilledAndStartedAgainHasRecovered) {
  start();
  auto worker = rank_on("a", 0, 1);
  ASSERT_EQ(sum_of(*worker).size(), 32u) << worker->err();
  Process command(drill({"kill", "i", "--yes"}));
  const auto end = worker->wait();
  ASSERT_TRUE(end) << command.out() << command.err();
  EXPECT_EQ(end->signal, SIGKILL);
  worker = rank_on("a", 0, 1);
  const auto done = command.wait();
  ASSERT_TRUE(done) << command.out();
  EXPECT_EQ(done->code, 0) << command.out() << command.err();
  EXPECT_THAT(command.out(),
              AllOf(HasSubstr("kill the worker i/0 on a (pid "), HasSubstr("i unfit: rank 0"),
                    HasSubstr("i ready"), HasSubstr("lost: nothing"), HasSubstr("recovered in ")));
}

TEST_F(Drills, AStandbyTakesOverFromAWorkerThatIsKilled) {
  start();
  const auto running = supervised_worker("1");
  ASSERT_TRUE(running->wait_for_err(" is ready after ")) << running->err();
  // Its age tells it from a process that starts after the death.
  std::this_thread::sleep_for(1s);
  const auto answer = Fleet::answer_of(run(drill({"kill", "i", "--yes", "--json"})));
  EXPECT_EQ(answer.exit_code, 0) << answer.json << answer.err;
  EXPECT_THAT(phases_of(answer.json), ElementsAre("detect", "takeover", "load", "commit"))
      << answer.json;
  EXPECT_THAT(running->err(), HasSubstr(" takes over"));
  EXPECT_TRUE(running->running());
}

TEST_F(Drills, TheTimeLineEndsWithTheFirstAnswerOfTheEngine) {
  start();
  const auto running = supervised_worker("0");
  Engine engine(2);
  const auto answer =
      Fleet::answer_of(run(drill({"kill", "i", "--yes", "--json", "--first-token", engine.url(),
                                  "--first-token-body", R"({"max_tokens": 1})"})));
  EXPECT_EQ(answer.exit_code, 0) << answer.json << answer.err;
  EXPECT_THAT(phases_of(answer.json),
              ElementsAre("detect", "restart", "start", "load", "commit", "first_token"));
  ASSERT_EQ(engine.requests().size(), 3u);
  EXPECT_THAT(engine.requests().back(),
              AllOf(HasSubstr("POST /v1/completions HTTP/1.1"), HasSubstr(R"({"max_tokens": 1})")));
}

TEST_F(Drills, ACommandMayAskTheEngineAndAnEngineThatNeverAnswersIsNotRecovered) {
  start();
  const auto running = supervised_worker("0");
  const std::string asked = fleet_.dir("asked").string();
  const Finished done = run(drill({"kill", "i", "--yes", "--first-token-command",
                                   "test -e " + asked + " || { touch " + asked + "; exit 4; }"}));
  EXPECT_EQ(done.exit.code, 0) << done.out << done.err;
  EXPECT_THAT(done.out, AllOf(HasSubstr("a request succeeds"), HasSubstr("first_token")));

  const auto answer = Fleet::answer_of(run(drill(
      {"kill", "i", "--yes", "--json", "--timeout", "3s", "--first-token-command", "exit 4"})));
  EXPECT_EQ(answer.exit_code, 5) << answer.json << answer.err;
  EXPECT_THAT(answer.json["advice"],
              AllOf(HasSubstr("the instance is ready, but no request"), HasSubstr("exits with 4")));
  EXPECT_THAT(phases_of(answer.json), ElementsAre("detect", "restart", "start", "load", "commit"));
}

TEST_F(Drills, AWrongWayToAskTheEngineIsRefusedBeforeAnythingIsKilled) {
  start();
  const auto worker = rank_on("a", 0, 1);
  ASSERT_EQ(sum_of(*worker).size(), 32u) << worker->err();
  for (const std::vector<std::string>& wrong : std::vector<std::vector<std::string>>{
           {"--first-token", "https://127.0.0.1/"},
           {"--first-token", "http://:80/"},
           {"--first-token-body", "{}"},
           {"--first-token", "http://127.0.0.1/", "--first-token-command", "true"}}) {
    std::vector<std::string> arguments = {"kill", "i", "--yes"};
    arguments.insert(arguments.end(), wrong.begin(), wrong.end());
    const Finished done = run(drill(std::move(arguments)));
    EXPECT_EQ(done.exit.code, 2) << done.err;
    EXPECT_THAT(done.err, HasSubstr("--first-token"));
  }
  EXPECT_TRUE(worker->running());
}

TEST_F(Drills, AnAgentThatIsKilledAndStartedAgainHasRecovered) {
  start();
  Process command(drill({"kill-agent", "a", "--yes"}));
  ASSERT_TRUE(agent().wait()) << command.out() << command.err();
  fleet_.start_agent("a");
  const auto done = command.wait();
  ASSERT_TRUE(done) << command.out();
  EXPECT_EQ(done->code, 0) << command.out() << command.err();
  EXPECT_THAT(command.out(),
              AllOf(HasSubstr("a new process of a has registered"), HasSubstr("lost: nothing")));
}

TEST_F(Drills, AnAgentThatStaysAwayIsReportedWithWhatWentWithIt) {
  start();
  Spawn spawn = drill({"kill-agent", "a", "--yes", "--timeout", "4s", "--json"});
  const auto answer = Fleet::answer_of(run(std::move(spawn)));
  EXPECT_EQ(answer.exit_code, 1) << answer.err;
  EXPECT_EQ(answer.json["recovered"], false);
  EXPECT_EQ(answer.json["lost"], nlohmann::json::array({"m@1"})) << answer.json;
  EXPECT_THAT(answer.json["advice"], HasSubstr("systemd"));
  EXPECT_THAT(answer.json["steps"].dump(), HasSubstr("the coordinator sees that a is dead"));
}

TEST_F(Drills, APullThatLosesItsSourceGoesOnFromAnother) {
  start_two();
  const Finished done = run(kill_source(), 60s);
  EXPECT_EQ(done.exit.code, 0) << done.out << done.err;
  EXPECT_THAT(done.out, AllOf(HasSubstr("a source of the pull"),
                              HasSubstr("the pull is complete, and every byte verified"),
                              ContainsRegex("the coordinator sees that [ab] is dead"),
                              HasSubstr("lost: nothing")));
  EXPECT_NE(fleet_.agent("a").process->running(), fleet_.agent("b").process->running());
  EXPECT_FALSE(left_something_behind());
}

TEST_F(Drills, WhatIsLostIsNotKnownBeforeTheCoordinatorMissesTheSource) {
  start_two({"--dead-after", "10min", "--suspect-after", "5min"});
  const auto answer = Fleet::answer_of(run(kill_source({"--timeout", "3s", "--json"}), 60s));
  EXPECT_EQ(answer.exit_code, 5) << answer.json << answer.err;
  EXPECT_EQ(answer.json["recovered"], false);
  EXPECT_TRUE(answer.json["lost"].is_null()) << answer.json;
  EXPECT_THAT(answer.json["advice"], HasSubstr("has not noticed that"));
}

TEST_F(Drills, AnInterruptedPullLeavesNothingBehind) {
  start_two();
  Process command(kill_source());
  ASSERT_TRUE(eventually([&] { return left_something_behind(); })) << command.err();
  command.signal(SIGINT);
  const auto done = command.wait();
  ASSERT_TRUE(done) << command.out();
  EXPECT_EQ(done->code, 130) << command.out() << command.err();
  EXPECT_FALSE(left_something_behind());
}

TEST_F(Drills, APullThatIsTooShortToLoseASourceSaysSo) {
  start();
  const Finished done =
      run(drill({"kill-source", "m@1", "--yes", "--to", fleet_.dir("").string()}));
  EXPECT_EQ(done.exit.code, 2) << done.out << done.err;
  EXPECT_THAT(done.err, HasSubstr("choose a larger version"));
  EXPECT_TRUE(agent().running());
}

// Nobody but its own timer wakes the agent: the command is gone by then.
TEST_F(Drills, AFrozenAgentGoesOnByItself) {
  start();
  const pid_t pid = agent().pid();
  Process command(drill({"freeze", "a", "--for", "3s", "--yes"}));
  ASSERT_TRUE(command.wait_for_out("the coordinator sees that a is suspect")) << command.err();
  command.kill();
  EXPECT_TRUE(agent().wait_for_err("frozen_ms=3000 now=\"runs again\""));
  EXPECT_EQ(agent().pid(), pid);
  EXPECT_TRUE(agent().running());
}

TEST_F(Drills, AFrozenAgentThatIsBackHasRecovered) {
  start();
  const Finished done = run(drill({"freeze", "a", "--for", "3s", "--yes"}));
  EXPECT_EQ(done.exit.code, 0) << done.out << done.err;
  EXPECT_THAT(done.out,
              AllOf(HasSubstr("the coordinator sees that a is "),
                    HasSubstr("a is alive, with its copies: 1"), HasSubstr("lost: nothing")));
}

TEST_F(Drills, ALeaderThatIsKilledAndStartedAgainHasRecovered) {
  start();
  Process command(drill({"leader", "--yes"}));
  ASSERT_TRUE(fleet_.coordinator().wait()) << command.out() << command.err();
  fleet_.start_coordinator();
  const auto done = command.wait();
  ASSERT_TRUE(done) << command.out();
  EXPECT_EQ(done->code, 0) << command.out() << command.err();
  EXPECT_THAT(command.out(), AllOf(HasSubstr("a coordinator leads in epoch "),
                                   HasSubstr("with their copies: 1"), HasSubstr("lost: nothing")));
}

TEST_F(Drills, WithoutAllowDrillsADaemonRefuses) {
  start({});
  for (const auto& arguments : std::vector<std::vector<std::string>>{
           {"kill-agent", "a", "--yes"}, {"freeze", "a", "--yes"}, {"leader", "--dry-run"}}) {
    const Finished done = run(drill(arguments));
    EXPECT_EQ(done.exit.code, 7) << done.err;
    EXPECT_THAT(done.err, HasSubstr("--allow-drills"));
  }
  EXPECT_TRUE(agent().running());
  EXPECT_TRUE(fleet_.coordinator().running());
}

TEST_F(Drills, NothingIsKilledUnconfirmedOrDry) {
  start();
  const auto worker = rank_on("a", 0, 1);
  ASSERT_EQ(sum_of(*worker).size(), 32u) << worker->err();
  for (const std::vector<std::string>& target : std::vector<std::vector<std::string>>{
           {"kill", "i"}, {"kill-agent", "a"}, {"freeze", "a"}, {"leader"}}) {
    const Finished asked = run(drill(target));
    EXPECT_EQ(asked.exit.code, 2) << asked.err;
    EXPECT_THAT(asked.err, HasSubstr("--yes"));
    auto arguments = target;
    arguments.emplace_back("--dry-run");
    const Finished dry = run(drill(arguments));
    EXPECT_EQ(dry.exit.code, 0) << dry.err;
    EXPECT_THAT(dry.out, AnyOf(HasSubstr("would kill the "), HasSubstr("would freeze the ")));
  }
  EXPECT_EQ(run(drill({"kill", "i", "--rank", "1", "--yes"})).exit.code, 3);
  EXPECT_EQ(run(drill({"kill-agent", "z", "--yes"})).exit.code, 3);
  EXPECT_EQ(run(drill({"kill", "i/x", "--yes"})).exit.code, 2);
  EXPECT_EQ(run(drill({"freeze", "a", "--for", "61s", "--yes"})).exit.code, 2);
  EXPECT_TRUE(worker->running());
  EXPECT_TRUE(agent().running());
  EXPECT_TRUE(fleet_.coordinator().running());
}

// A source that another process replaces is no source any more, whatever it holds.
TEST_F(Drills, ASourceThatComesBackWithLessIsNoticed) {
  start_two({"--dead-after", "10min", "--suspect-after", "5min"});
  Process command(kill_source());
  const auto killed = [&]() -> std::string {
    for (const char* name : {"a", "b"}) {
      if (!fleet_.agent(name).process->running()) return name;
    }
    return "";
  };
  ASSERT_TRUE(eventually([&] { return !killed().empty(); })) << command.out() << command.err();
  const std::string name = killed();
  std::filesystem::remove_all(fleet_.agent(name).store);
  fleet_.start_agent(name);
  const auto done = command.wait(60s);
  ASSERT_TRUE(done) << command.out();
  EXPECT_EQ(done->code, 0) << command.out() << command.err();
  EXPECT_THAT(command.out(), AllOf(HasSubstr("a new process of " + name + " has registered"),
                                   HasSubstr("lost: nothing")));
}

TEST_F(Drills, AnInterruptDoesNotWaitForASilentCoordinator) {
  start();
  Process command(drill({"kill-agent", "a", "--yes"}));
  ASSERT_TRUE(command.wait_for_out("the coordinator sees that a is ")) << command.err();
  fleet_.coordinator().signal(SIGSTOP);
  // The next call waits by then.
  std::this_thread::sleep_for(500ms);
  command.signal(SIGINT);
  const auto done = command.wait();
  fleet_.coordinator().signal(SIGCONT);
  ASSERT_TRUE(done) << command.out();
  EXPECT_EQ(done->code, 130) << command.out() << command.err();
  EXPECT_THAT(command.out(), Not(HasSubstr("does not answer")));
}

class CutLink : public Drills {
 protected:
  void start_sources(const std::vector<std::string>& names) {
    make_checkpoint(fleet_.dir("model"), 8, 2048, 9);
    fleet_.start_coordinator();
    for (const auto& name : names) {
      fleet_.start_agent(name, {"--allow-drills", "--max-rate", "6MB"});
      fleet_.publish(name, "m@1", fleet_.dir("model"));
    }
    fleet_.start_agent("c", {"--allow-drills"});
  }
  // By the agent c.
  std::unique_ptr<Process> pull(const std::string& transport) {
    auto process = std::make_unique<Process>(fleet_.command(
        {"pull", "m@1", "--store", fleet_.agent("c").store, "--transport", transport}));
    return process;
  }
  bool reads_from(const std::string& name) {
    return eventually([&] { return fleet_.agent(name).sessions_opened() > 0; });
  }
  static void expect_end(Process& process) {
    const auto done = process.wait(60s);
    ASSERT_TRUE(done) << process.out() << process.err();
    EXPECT_EQ(done->code, 0) << process.out() << process.err();
  }
};

TEST_F(CutLink, APullMovesToAnotherSourceAndTheLinkHeals) {
  start_sources({"a", "b"});
  const auto puller = pull("tcp");
  ASSERT_TRUE(reads_from("a") && reads_from("b")) << puller->err();
  Process command(drill({"cut-link", "a", "--for", "4s", "--yes"}));
  expect_end(command);
  EXPECT_THAT(command.out(),
              AllOf(HasSubstr("cut the data links of a to 2 other agents for 4s"),
                    HasSubstr("the pull of m@1 by c reads from a over the link: tcp "),
                    HasSubstr("the pull of m@1 by c gave the route up "),
                    HasSubstr("the pull of m@1 by c goes on from b: tcp "),
                    HasSubstr("the link has healed at a"), HasSubstr("the link has healed at c"),
                    HasSubstr("the pull of m@1 by c is complete, and every byte verified"),
                    HasSubstr("lost: nothing")));
  expect_end(*puller);
  // Its calls went on.
  EXPECT_THAT(fleet_.coordinator().err(), Not(HasSubstr("suspect")));
}

TEST_F(CutLink, SharedMemoryFallsSilentToo) {
  start_sources({"a", "b"});
  Process command(drill({"cut-link", "a", "--to", "c", "--for", "4s", "--yes"}));
  ASSERT_TRUE(command.wait_for_out("cut the data links of a to c for 4s")) << command.err();
  const auto puller = pull("shm");
  expect_end(*puller);
  expect_end(command);
  EXPECT_THAT(command.out(),
              AllOf(HasSubstr("the pull of m@1 by c reads from a over the link: shm "),
                    HasSubstr("the pull of m@1 by c gave the route up "),
                    HasSubstr("the pull of m@1 by c goes on from b: shm "),
                    HasSubstr("the pull of m@1 by c is complete")));
}

// The pull has no other source, and nobody but the agents ends the silence.
TEST_F(CutLink, ItHealsWhenTheCommandAndTheCoordinatorAreGone) {
  start_sources({"a"});
  const auto puller = pull("tcp");
  ASSERT_TRUE(reads_from("a")) << puller->err();
  Process command(drill({"cut-link", "c", "--for", "2s", "--yes"}));
  ASSERT_TRUE(command.wait_for_out("reads from a over the link")) << command.err();
  command.kill();
  fleet_.coordinator().kill();
  expect_end(*puller);
}

TEST_F(CutLink, ASignalHealsTheLinkAtOnce) {
  start_sources({"a"});
  const auto puller = pull("tcp");
  ASSERT_TRUE(reads_from("a")) << puller->err();
  Process command(drill({"cut-link", "c", "--to", "a", "--for", "60s", "--yes"}));
  ASSERT_TRUE(command.wait_for_out("reads from a over the link")) << command.err();
  for (const char* name : {"a", "c"}) fleet_.agent(name).process->signal(SIGHUP);
  expect_end(*puller);
  expect_end(command);
}

TEST_F(CutLink, AnAgentEndsInTheMiddleOfACut) {
  start_sources({"a"});
  const auto puller = pull("tcp");
  ASSERT_TRUE(reads_from("a")) << puller->err();
  Process command(drill({"cut-link", "c", "--for", "60s", "--yes"}));
  ASSERT_TRUE(command.wait_for_out("reads from a over the link")) << command.err();
  Process& reader = *fleet_.agent("c").process;
  reader.signal(SIGTERM);
  const auto end = reader.wait();
  ASSERT_TRUE(end) << reader.err();
  EXPECT_EQ(end->code, 0) << reader.err();
}

TEST_F(CutLink, AnotherLinkIsLeftAlone) {
  start_sources({"a", "b"});
  const auto puller = pull("tcp");
  ASSERT_TRUE(reads_from("a") && reads_from("b")) << puller->err();
  const Finished done = run(drill({"cut-link", "a", "--to", "b", "--for", "500ms", "--yes"}), 60s);
  EXPECT_EQ(done.exit.code, 0) << done.out << done.err;
  EXPECT_THAT(done.out, AllOf(HasSubstr("no pull of these agents ran over the link"),
                              Not(HasSubstr("gave the route up"))));
  expect_end(*puller);
}

TEST_F(CutLink, WhatMakesNoSenseIsRefused) {
  start();
  fleet_.start_agent("b", {"--allow-drills"});
  const auto code = [&](std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), "cut-link");
    return run(drill(std::move(arguments))).exit.code;
  };
  EXPECT_EQ(code({"a"}), 2);
  EXPECT_EQ(code({"a", "--dry-run"}), 0);
  EXPECT_EQ(code({"a", "--to", "a", "--yes"}), 2);
  EXPECT_EQ(code({"a", "--for", "61s", "--yes"}), 2);
  EXPECT_EQ(code({"a", "--for", "0s", "--yes"}), 2);
  EXPECT_EQ(code({"a", "--to", "z", "--yes"}), 3);
  EXPECT_EQ(code({"z", "--yes"}), 3);
  const Finished rail = run(drill({"cut-link", "a:nic9:1", "--yes"}));
  EXPECT_EQ(rail.exit.code, 3) << rail.out;
  EXPECT_THAT(rail.err, HasSubstr("no rail 'nic9:1'"));
  fleet_.start_agent("d");
  const Finished refused = run(drill({"cut-link", "a", "--yes"}));
  EXPECT_EQ(refused.exit.code, 7) << refused.out;
  EXPECT_THAT(refused.err, AllOf(HasSubstr("the agent d"), HasSubstr("--allow-drills")));
}

}  // namespace
}  // namespace rekindle::testing
