#include "src/store/fault_guard.h"

#include <atomic>
#include <thread>

#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <gmock/gmock.h>

namespace rekindle::store {
namespace {

using ::testing::HasSubstr;

// Two mapped pages of a file that has only one of them.
class CutMapping {
 public:
  CutMapping() {
    const int fd = ::memfd_create("cut", 0);
    EXPECT_EQ(::ftruncate(fd, 8192), 0);
    data_ = static_cast<volatile char*>(
        ::mmap(nullptr, 8192, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0));
    EXPECT_EQ(::ftruncate(fd, 4096), 0);
    ::close(fd);
  }
  ~CutMapping() { ::munmap(const_cast<char*>(data_), 8192); }
  CutMapping(const CutMapping&) = delete;
  CutMapping& operator=(const CutMapping&) = delete;
  char read(int at) const { return data_[at]; }
  void write(int at) const { data_[at] = 1; }
  const void* address(int at) const { return const_cast<const char*>(data_ + at); }

 private:
  volatile char* data_;
};

TEST(FaultGuardTest, AccessWithinTheFileSucceeds) {
  const CutMapping mapping;
  EXPECT_TRUE(guard_mapping_access("x", [&] { mapping.write(4095); }));
}

TEST(FaultGuardTest, ReadsAndWritesBeyondTheFileAreErrors) {
  const CutMapping mapping;
  for (int round = 0; round < 3; ++round) {
    const auto read = guard_mapping_access("a.safetensors", [&] { mapping.read(4096); });
    ASSERT_FALSE(read);
    EXPECT_EQ(read.error().code(), ErrorCode::kCorrupt);
    EXPECT_THAT(read.error().message(), HasSubstr("a.safetensors: truncated"));
    EXPECT_FALSE(guard_mapping_access("a", [&] { mapping.write(4096); }));
  }
}

TEST(FaultGuardTest, TheAddressTellsWhichOfTwoMappingsFailed) {
  const CutMapping from;
  const CutMapping to;
  const auto copy = [&](int source, int target) {
    return find_mapping_fault([&] {
      (void)from.read(source);
      to.write(target);
    });
  };
  EXPECT_EQ(copy(0, 0), nullptr);
  EXPECT_EQ(copy(5000, 0), from.address(5000));
  EXPECT_EQ(copy(0, 6000), to.address(6000));
}

TEST(FaultGuardTest, GuardsNest) {
  const CutMapping mapping;
  bool went_on = false;
  const auto outer = guard_mapping_access("outer", [&] {
    {
      const auto inner = guard_mapping_access("inner", [&] { mapping.read(4096); });
      went_on = !inner;
    }  // a fault runs no destructors
    mapping.read(4096);
  });
  EXPECT_TRUE(went_on);
  ASSERT_FALSE(outer);
  EXPECT_THAT(outer.error().message(), HasSubstr("outer"));
}

TEST(FaultGuardTest, EachThreadLeavesItsOwnGuard) {
  const CutMapping mapping;
  std::atomic<int> caught = 0;
  std::atomic<int> passed = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 200; ++i) {
        const bool bad = (i + t) % 2 == 0;
        const auto result = guard_mapping_access("x", [&] { mapping.read(bad ? 4096 : 0); });
        (result ? passed : caught) += result.has_value() != bad ? 1 : 0;
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(caught, 400);
  EXPECT_EQ(passed, 400);
}

// What becomes of a process that runs `body` in a child: its wait status.
template <typename Body>
int in_child(Body body) {
  const pid_t child = ::fork();
  if (child == 0) {
    body();
    ::_exit(0);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  return status;
}

TEST(FaultGuardTest, AFaultOutsideAGuardStillKills) {
  const int status = in_child([] {
    ::signal(SIGBUS, SIG_DFL);
    const CutMapping mapping;
    (void)guard_mapping_access("x", [&] { mapping.read(4096); });
    mapping.read(4096);
  });
  ASSERT_TRUE(WIFSIGNALED(status));
  EXPECT_EQ(WTERMSIG(status), SIGBUS);
}

TEST(FaultGuardDeathTest, AnEarlierHandlerKeepsItsSignals) {
  // A process of its own: the guard's handler is installed once, after the other one.
  ::testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_EXIT(
      {
        struct sigaction action {};
        action.sa_sigaction = [](int, siginfo_t* info, void*) {
          ::_exit(info->si_code > 0 ? 42 : 43);
        };
        action.sa_flags = SA_SIGINFO;
        ::sigaction(SIGBUS, &action, nullptr);
        const CutMapping mapping;
        if (guard_mapping_access("x", [&] { mapping.read(4096); })) ::_exit(1);
        mapping.read(4096);
      },
      ::testing::ExitedWithCode(42), "");
  EXPECT_EXIT(
      {
        ::signal(SIGBUS, [](int) { ::_exit(44); });
        (void)guard_mapping_access("x", [&] { ::kill(::getpid(), SIGBUS); });
      },
      ::testing::ExitedWithCode(44), "");
}

}  // namespace
}  // namespace rekindle::store
