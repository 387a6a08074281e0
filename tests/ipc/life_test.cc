// Deaths of real processes, as the watch reports them. No test measures time; life_bench does.
#include "src/ipc/life.h"

#include <atomic>
#include <condition_variable>
#include <csignal>
#include <map>
#include <mutex>
#include <vector>

#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "src/ipc/channel.h"
#include "src/ipc/unix_socket.h"
#include "tests/ipc/socket_pair.h"
#include "tests/support/process.h"

namespace rekindle::ipc {
namespace {

using namespace rekindle::ipc::testing;  // NOLINT(google-build-using-namespace)
using rekindle::testing::Process;
using rekindle::testing::TempDir;
using ::testing::AnyOf;

// The reports of the watch.
class Deaths {
 public:
  void put(std::uint64_t worker, DeathSign sign) {
    const std::lock_guard lock(mutex_);
    seen_[worker].push_back(sign);
    changed_.notify_all();
  }
  std::optional<DeathSign> wait_for(std::uint64_t worker) {
    std::unique_lock lock(mutex_);
    changed_.wait_until(lock, soon(), [&] { return seen_.count(worker) != 0; });
    const auto found = seen_.find(worker);
    if (found == seen_.end()) return std::nullopt;
    return found->second.front();
  }
  std::size_t count(std::uint64_t worker) {
    const std::lock_guard lock(mutex_);
    // A question about a worker does not count as a report.
    const auto found = seen_.find(worker);
    return found == seen_.end() ? 0 : found->second.size();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::uint64_t, std::vector<DeathSign>> seen_;
};

struct Worker {
  std::unique_ptr<Process> process;
  // The agent's end.
  UniqueFd socket;
};

class LifeWatchOfProcesses : public ::testing::Test {
 protected:
  LifeWatchOfProcesses() {
    ::chmod(directory_.path().c_str(), 0700);
    listener_ = std::move(*listen_unix_socket(path()));
    watch_ = std::move(
        *LifeWatch::start([this](const Death& death) { deaths_.put(death.worker, death.sign); }));
  }

  std::string path() const { return directory_ / "worker.sock"; }

  // Starts a worker that holds its page, and watches it as `number`.
  Worker start(std::uint64_t number, const std::string& mode, bool dumps = false) {
    rekindle::testing::Spawn spawn{.argv = {LIFE_WORKER, path(), mode}};
    spawn.cwd = directory_.path();
    if (dumps) spawn.limits = {{RLIMIT_CORE, {RLIM_INFINITY, RLIM_INFINITY}}};
    Worker worker{std::make_unique<Process>(std::move(spawn)), {}};
    auto ready = wait_for(listener_.get(), POLLIN, soon());
    if (!ready || !*ready) throw std::runtime_error("the worker did not connect");
    worker.socket.reset(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    auto page = std::move(*LifePage::create());
    auto channel = *Channel::adopt(UniqueFd(::dup(worker.socket.get())), 0);
    auto sent = channel.send("life", copies_of(page->fd(), 1), soon());
    auto added = watch_->add(number, std::move(page), std::move(*peer_of(worker.socket.get())));
    if (!sent || !added || !worker.process->wait_for_out("held")) {
      throw std::runtime_error("the worker does not hold its page: " + worker.process->err());
    }
    return worker;
  }

  // Afterwards, the watch has reported every death before this call.
  void settle() {
    constexpr std::uint64_t kProbe = 1'000'000;
    Worker probe = start(kProbe, "hold");
    probe.process->kill();
    ASSERT_TRUE(deaths_.wait_for(kProbe));
  }

  TempDir directory_;
  UniqueFd listener_;
  Deaths deaths_;
  std::unique_ptr<LifeWatch> watch_;
};

TEST_F(LifeWatchOfProcesses, AKilledWorkerIsSeenByItsFutexOnce) {
  Worker worker = start(1, "hold");
  worker.process->kill();
  EXPECT_EQ(deaths_.wait_for(1), DeathSign::kFutex);
  settle();
  EXPECT_EQ(deaths_.count(1), 1u);
  EXPECT_EQ(watch_->size(), 0u);
}

TEST_F(LifeWatchOfProcesses, ALargeWorkerIsSeenByItsFutex) {
  Worker worker = start(1, "large");
  worker.process->signal(SIGKILL);
  EXPECT_EQ(deaths_.wait_for(1), DeathSign::kFutex);
}

TEST_F(LifeWatchOfProcesses, AnExitIsSeenInEveryForm) {
  std::uint64_t number = 0;
  for (const char* const mode : {"hold", "return", "exec"}) {
    SCOPED_TRACE(mode);
    Worker worker = start(++number, mode);
    worker.process->signal(SIGUSR1);
    if (std::string(mode) == "return") {  // main() returns: the hold lets go, the process ends
      EXPECT_TRUE(deaths_.wait_for(number));
    } else {
      EXPECT_EQ(deaths_.wait_for(number), DeathSign::kFutex);
    }
  }
}

TEST_F(LifeWatchOfProcesses, AWorkerWithoutAHoldIsSeenByItsPidfd) {
  Worker worker = start(1, "hold");
  Process bare({.argv = {LIFE_WORKER, path(), "bare"}});
  ASSERT_TRUE(*wait_for(listener_.get(), POLLIN, soon()));
  const UniqueFd socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
  auto page = std::move(*LifePage::create());
  auto channel = *Channel::adopt(UniqueFd(::dup(socket.get())), 0);
  ASSERT_TRUE(channel.send("life", copies_of(page->fd(), 1), soon()));
  ASSERT_TRUE(bare.wait_for_out("held"));
  ASSERT_TRUE(watch_->add(2, std::move(page), std::move(*peer_of(socket.get()))));
  bare.kill();
  EXPECT_EQ(deaths_.wait_for(2), DeathSign::kPidfd);
  EXPECT_EQ(deaths_.count(1), 0u);
}

TEST_F(LifeWatchOfProcesses, Row2AWorkerThatDumpsItsCoreIsSeenOnce) {
  Worker worker = start(1, "large", true);
  worker.process->signal(SIGABRT);
  // Either sign may come first: without a dump, or with a quick one, the process ends at once.
  const auto sign = deaths_.wait_for(1);
  ASSERT_TRUE(sign);
  EXPECT_THAT(*sign, AnyOf(DeathSign::kCoreDump, DeathSign::kFutex));
  RecordProperty("sign", std::string(to_string(*sign)));
  ASSERT_TRUE(worker.process->wait());
  settle();
  EXPECT_EQ(deaths_.count(1), 1u) << "the futex that follows a dump is not a second death";
}

TEST_F(LifeWatchOfProcesses, AForkedChildDoesNotKeepItsDeadParentAlive) {
  Worker worker = start(1, "fork");
  const pid_t child = static_cast<pid_t>(std::stol(worker.process->value_after("child=")));
  worker.process->kill();
  EXPECT_EQ(deaths_.wait_for(1), DeathSign::kFutex);
  EXPECT_EQ(::kill(child, SIGKILL), 0) << "the child should have outlived it";
}

TEST_F(LifeWatchOfProcesses, LettingGoIsNoDeath) {
  Worker worker = start(1, "release");
  worker.process->signal(SIGUSR1);
  ASSERT_TRUE(worker.process->wait_for_out("released"));
  settle();
  EXPECT_EQ(deaths_.count(1), 0u);
  worker.process->kill();
  EXPECT_EQ(deaths_.wait_for(1), DeathSign::kPidfd) << "it is watched until it is removed";
}

TEST_F(LifeWatchOfProcesses, ARemovedWorkerIsNotReported) {
  Worker worker = start(1, "hold");
  watch_->remove(1);
  worker.process->kill();
  settle();
  EXPECT_EQ(deaths_.count(1), 0u);
}

TEST_F(LifeWatchOfProcesses, ADeathBeforeTheWatchBeginsIsSeen) {
  Worker worker = start(1, "hold");
  const auto peer_pid = peer_of(worker.socket.get())->pid;
  EXPECT_EQ(peer_pid, worker.process->pid());
  auto page = std::move(*LifePage::create());
  // As the kernel leaves it.
  std::atomic_ref(*page->word()).store(0x40000000u | 12345u);
  ASSERT_TRUE(watch_->add(2, std::move(page), {}));
  EXPECT_EQ(deaths_.wait_for(2), DeathSign::kFutex);
}

TEST_F(LifeWatchOfProcesses, AWorkerThatScribblesOnItsPageHarmsOnlyItself) {
  Worker mad = start(1, "scribble");
  Worker sane = start(2, "hold");
  sane.process->kill();
  EXPECT_EQ(deaths_.wait_for(2), DeathSign::kFutex);
  EXPECT_EQ(deaths_.count(1), 0u);
  mad.process->kill();
  EXPECT_EQ(deaths_.wait_for(1), DeathSign::kPidfd);
}

TEST_F(LifeWatchOfProcesses, MoreWorkersThanTheKernelWaitsForAtOnceAreSeen) {
  // FUTEX_WAITV takes 128.
  constexpr std::uint64_t kMany = 140;
  std::vector<Worker> workers;
  for (std::uint64_t i = 0; i < kMany; ++i) workers.push_back(start(i, "hold"));
  EXPECT_EQ(watch_->size(), kMany);
  for (Worker& worker : workers) worker.process->signal(SIGKILL);
  for (std::uint64_t i = 0; i < kMany; ++i) {
    EXPECT_EQ(deaths_.wait_for(i), DeathSign::kFutex) << "worker " << i;
  }
}

}  // namespace
}  // namespace rekindle::ipc
