#include "tests/chaos/faults.h"

#include <csignal>
#include <cstdio>

namespace rekindle::testing::chaos {

namespace {

constexpr std::uint64_t kMostVersions = 6;
constexpr milliseconds kPublishPatience{4'000};  // then the command is killed, halfway perhaps
constexpr std::uint64_t kFlipEveryBytes = 1 << 20;

}  // namespace

Faults::Faults(World& world, std::uint64_t seed) : world_(world), random_(seed) {}

Host& Faults::any_host() { return world_.hosts()[random_() % world_.hosts().size()]; }

milliseconds Faults::up_to(milliseconds limit) {
  return milliseconds(random_() % static_cast<std::uint64_t>(limit.count()));
}

void Faults::later(milliseconds delay, std::function<void()> mend) {
  mending_.emplace(Clock::now() + delay, std::move(mend));
}

void Faults::say(const std::string& what) {
  const auto since = std::chrono::duration<double>(Clock::now() - started_).count();
  std::printf("%7.2f  %s\n", since, what.c_str());
  std::fflush(stdout);
}

void Faults::mend_what_is_due() {
  while (!mending_.empty() && mending_.begin()->first <= Clock::now()) {
    const auto mend = std::move(mending_.begin()->second);
    mending_.erase(mending_.begin());
    mend();
  }
}

void Faults::step() {
  mend_what_is_due();
  const std::pair<int, void (Faults::*)()> kinds[] = {
      {6, &Faults::kill_worker},      {2, &Faults::stop_worker}, {5, &Faults::kill_agent},
      {3, &Faults::stop_agent},       {2, &Faults::lose_host},   {3, &Faults::kill_coordinator},
      {2, &Faults::stop_coordinator}, {3, &Faults::cut_off},     {5, &Faults::break_data},
      {1, &Faults::publish}};
  int total = 0;
  for (const auto& [weight, kind] : kinds) total += weight;
  int choice = static_cast<int>(random_() % static_cast<std::uint64_t>(total));
  for (const auto& [weight, kind] : kinds) {
    if ((choice -= weight) < 0) return (this->*kind)();
  }
}

void Faults::heal() {
  say("everything is mended");
  while (!mending_.empty()) {
    const auto mend = std::move(mending_.begin()->second);
    mending_.erase(mending_.begin());
    mend();
  }
}

void Faults::kill_worker() {
  Host& host = any_host();
  say("SIGKILL to the worker of " + host.name);
  ++counts_["worker killed"];
  world_.kill_worker(host);
}

void Faults::stop_worker() {
  Host& host = any_host();
  const pid_t pid = World::worker_pid(host);
  if (pid <= 0) return;
  say("SIGSTOP to the worker of " + host.name);
  ++counts_["worker stopped"];
  ::kill(pid, SIGSTOP);
  // Only its own process can have that number: nobody but we reaps its supervisor.
  later(up_to(3'000ms), [&host, pid] {
    if (World::worker_pid(host) == pid) ::kill(pid, SIGCONT);
  });
}

void Faults::restart_agent(Host& host) {
  if (host.agent != nullptr) return;
  say("agent " + host.name + " is started again");
  world_.start_agent(host);
}

void Faults::kill_agent() {
  Host& host = any_host();
  if (host.agent == nullptr) return;
  say("SIGKILL to agent " + host.name);
  ++counts_["agent killed"];
  world_.kill_agent(host);
  later(up_to(3'000ms), [this, &host] { restart_agent(host); });
}

void Faults::stop_agent() {
  Host& host = any_host();
  if (host.agent == nullptr) return;
  say("SIGSTOP to agent " + host.name);
  ++counts_["agent stopped"];
  host.agent->signal(SIGSTOP);
  later(up_to(4'000ms), [&host] {
    if (host.agent != nullptr) host.agent->signal(SIGCONT);
  });
}

// Never the first: what is published there is nowhere else yet.
void Faults::lose_host() {
  Host& host = any_host();
  if (&host == &world_.hosts().front() || host.agent == nullptr) return;
  say("host " + host.name + " is lost with all it had");
  ++counts_["host lost"];
  world_.lose_host(host);
  later(up_to(4'000ms), [this, &host] { restart_agent(host); });
}

void Faults::restart_coordinator() {
  if (world_.coordinator_runs()) return;
  say("the coordinator is started again");
  world_.start_coordinator();
}

void Faults::kill_coordinator() {
  if (!world_.coordinator_runs()) return;
  say("SIGKILL to the coordinator");
  ++counts_["coordinator killed"];
  world_.kill_coordinator();
  later(up_to(3'000ms), [this] { restart_coordinator(); });
}

void Faults::stop_coordinator() {
  if (!world_.coordinator_runs()) return;
  say("SIGSTOP to the coordinator");
  ++counts_["coordinator stopped"];
  world_.coordinator().signal(SIGSTOP);
  later(up_to(4'000ms), [this] {
    if (world_.coordinator_runs()) world_.coordinator().signal(SIGCONT);
  });
}

void Faults::cut_off() {
  Host& host = any_host();
  const std::uint64_t how = random_() % 3;
  ++counts_["cut off from the coordinator"];
  if (how == 2) {
    say("connections of " + host.name + " to the coordinator are reset");
    return host.to_coordinator->cut();
  }
  say(host.name + (how == 0 ? " no longer hears the coordinator"
                            : " and the coordinator no longer hear each other"));
  host.to_coordinator->stall(true);
  host.to_coordinator->stall_requests(how == 1);
  later(up_to(5'000ms), [&host] {
    host.to_coordinator->stall(false);
    host.to_coordinator->stall_requests(false);
  });
}

void Faults::break_data() {
  Host& host = any_host();
  ++counts_["data path broken"];
  switch (random_() % 4) {
    case 0:
      say("a bit flips in what is read from " + host.name);
      return host.data->flip_bits(1 + static_cast<int>(random_() % 3), kFlipEveryBytes);
    case 1:
      say("data connections to " + host.name + " are reset");
      return host.data->cut();
    case 2:
      say("data of " + host.name + " trickles");
      host.data->limit(1 << 20);
      return later(up_to(4'000ms), [&host] { host.data->limit(0); });
    default:
      say("data of " + host.name + " stalls");
      host.data->stall(true);
      return later(up_to(5'000ms), [&host] { host.data->stall(false); });
  }
}

void Faults::publish() {
  Host& host = world_.hosts().front();
  if (version_ == kMostVersions || host.agent == nullptr) return;
  ++version_;
  const bool done = world_.publish(version_, kPublishPatience);
  say("m@" + std::to_string(version_) + (done ? " is published" : " could not be published yet"));
  ++counts_["published"];
}

}  // namespace rekindle::testing::chaos
